"""What holds no gradients that can be written is refused by name."""

import numpy as np
import pytest
import torch

from gradclip._src.inplace.gradients import refuse_bare_gradients, refuse_leaf
from gradclip._src.passed.parameters import ParameterList
from gradclip._src.tree import flatten


def test_a_leaf_that_cannot_be_written():
    refuse_leaf(flatten({"a": np.ones(1)}))
    with pytest.raises(TypeError, match=r"must hold only NumPy arrays, got float at \['b'\]"):
        refuse_leaf(flatten({"a": np.ones(1), "b": 3.0}))


def test_tensors_that_look_like_gradients():
    one = torch.nn.Parameter(torch.ones(1))
    refuse_bare_gradients(ParameterList.of([one]))
    with pytest.raises(ValueError, match=r"parameters\[1\] has no \.grad and does not require one"):
        refuse_bare_gradients(ParameterList.of([one, torch.ones(1)]))
