"""Which units leaves have, and which parameter belongs to which gradient."""

from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from gradclip._src.backends.registry import find
from gradclip._src.core.layouts import units_along
from gradclip._src.core.units import Adaptive
from gradclip._src.passed.unit_axes import adaptive_of, check_shapes, parameters_beside, scopes_of
from gradclip._src.tree import flatten


def test_units_lie_as_the_framework_keeps_weights():
    for make, axis in ((np.ones, -1), (jnp.ones, -1), (torch.ones, 0)):
        tree = [make((2, 3)), make((2, 3, 2, 2)), make(4)]
        own = [units_along((axis % 2,)), units_along((axis % 4,)), units_along(())]
        assert scopes_of(flatten(tree), None) == own


@pytest.mark.parametrize(
    ("unit_axis", "own"), [(0, (0,)), (-1, (2,)), ((2, 0), (0, 2)), ([1, -2], (1,)), (np.int64(1), (1,)), ((), ())]
)
def test_units_lie_along_the_axes_that_are_named(unit_axis, own):
    assert scopes_of(flatten([np.ones((2, 3, 4)), np.ones(4), 1.0]), unit_axis) == [
        units_along(own),
        units_along(()),
        units_along(()),
    ]


def test_parameters_of_other_containers_with_the_same_keys():
    flat = flatten({"a": 1.0, "b": {"c": 2.0}})
    assert parameters_beside(flat, {"b": {"c": 3.0}, "a": 4.0}) == [4.0, 3.0]
    assert parameters_beside(flat, OrderedDict([("b", {"c": 3.0}), ("a", 4.0)])) == [4.0, 3.0]
    with pytest.raises(ValueError, match=r"there is no parameter for .*, and there is no gradient at \[0\]"):
        parameters_beside(flat, [3.0])
    with pytest.raises(ValueError, match="no gradient at the root"):
        parameters_beside(flat, 3.0)


def test_shapes_are_those_of_the_gradients():
    check_shapes([np.ones(3), 1.0], [torch.ones(3), np.float32(2)], lambda: ["a", "b"])
    with pytest.raises(ValueError, match=r"a has shape \(3,\), and its parameter \(3, 1\)"):
        check_shapes([np.ones(3)], [np.ones((3, 1))], lambda: ["a"])


def test_what_thresholds_follow_from():
    backend = find([torch.ones(1)], lambda: ["x"])
    assert adaptive_of(backend, 0.1, 1) == (Adaptive((0.1, 1.0)), [])
    tensor = torch.tensor(0.5)
    assert adaptive_of(backend, tensor, 0.1) == (Adaptive((0.5, 0.1), (True, False)), [tensor])
    traced = []
    jax.jit(lambda eps: traced.append(adaptive_of(find([jnp.ones(1), eps], list), 0.1, eps)) or eps)(0.5)
    assert traced[0][0] == Adaptive((0.1, None), (False, True))
