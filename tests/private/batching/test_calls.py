"""What a function of one example returns."""

import pickle

import numpy as np
import pytest
import tensorflow as tf

from gradclip import ExampleOutputs
from gradclip._src.private.batching.calls import check_loss, value_and_aux


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


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.ones(1), r"got an array of shape \(1,\)\. Return its mean or its sum\. With reduction='none'"),
        (np.ones((1, 2)), r"got an array .*: leave that out\. If it adds .* x\[None\], pass keep_batch_dim=True"),
        (np.ones((2, 3)), r"got an array of shape \(2, 3\)\. Return its mean .*: leave that out\.$"),
        ((1.0, 2.0), r"got a tuple of 2\. Return the loss alone\. If it is \(loss, aux\), pass has_aux=True\.$"),
        ([1.0], r"got a list of 1\. Return the loss alone\.$"),
        ({"loss": 1.0, "more": 2.0}, r"got a dict with the keys loss, more\. Return the one that is the loss"),
        (None, r"got None\. Return the loss at the end"),
        ("1.0", r"got an object of type str\. Return the array of the loss"),
    ],
)
def test_what_is_no_loss_is_named_with_what_to_return(value, said):
    with pytest.raises(ValueError, match=f"the loss must return one number for each example, {said}"):
        check_loss(value)


@pytest.mark.parametrize("value", [1.0, 1, np.float32(1), np.ones(()), tf.ones(())])
def test_one_number_is_a_loss(value):
    check_loss(value)


def test_a_shape_that_is_not_known_yet_is_no_error():
    @tf.function(input_signature=[tf.TensorSpec(None)], autograph=False)
    def checked(value):
        check_loss(value)
        return value

    assert float(checked(tf.ones(()))) == 1.0


def test_outputs_can_be_pickled():
    outputs = ExampleOutputs(norms=np.ones(2))
    assert pickle.loads(pickle.dumps(outputs)).norms.tolist() == [1.0, 1.0]
