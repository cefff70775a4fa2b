"""What a function of one example returns."""

import pickle

import numpy as np
import pytest

from gradclip import ExampleOutputs
from gradclip.per_example.outputs import value_and_aux


def test_a_kept_batch_axis_is_removed_from_the_second_result_alone():
    row, other = np.ones((1, 3)), np.ones((2, 1))
    value, aux = value_and_aux((row, {"a": row, "b": other, "c": np.float32(1)}), has_aux=True, keep_batch_dim=True)
    assert value.shape == (1, 3)
    assert {name: x.shape for name, x in aux.items()} == {"a": (3,), "b": (2, 1), "c": ()}
    assert value_and_aux((row, row), has_aux=True, keep_batch_dim=False)[1].shape == (1, 3)


def test_without_a_second_result_there_is_none():
    assert value_and_aux(3.0, has_aux=False, keep_batch_dim=True) == (3.0, ())


@pytest.mark.parametrize("result", [3.0, (1.0,), (1.0, 2.0, 3.0), {"value": 1.0, "aux": 2.0}])
def test_what_is_no_pair_is_named(result):
    with pytest.raises(TypeError, match=rf"must return a pair, \(value, aux\), got a {type(result).__name__}\."):
        value_and_aux(result, has_aux=True, keep_batch_dim=True)


def test_outputs_can_be_pickled():
    outputs = ExampleOutputs(norms=np.ones(2))
    assert pickle.loads(pickle.dumps(outputs)).norms.tolist() == [1.0, 1.0]
