"""The examples of a batch are ranked by their gradients, in every framework that differentiates."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch

import gradclip

X = np.array([[3.0, 4.0], [0.6, 0.8], [30.0, 40.0], [0.0, 0.0]], np.float32)
Y = np.array([1.0, 2.0, 0.5, 4.0], np.float32)
MAKERS = {"jax": jnp.asarray, "torch": torch.tensor, "tensorflow": tf.constant}


def loss(params, x, y):
    """The gradient for `w` is -y * x, that for `b` is -y."""
    left = y - (x * params["w"]).sum(-1) - params["b"] if not tf.is_tensor(x) else None
    if left is None:
        left = y - tf.reduce_sum(x * params["w"], -1) - params["b"]
        return tf.reduce_sum(left * left) / 2
    return (left * left).sum() / 2


def explained(make, x=X, y=Y, **settings):
    params = {"w": make(np.zeros(2, np.float32)), "b": make(np.float32(0.0))}
    return gradclip.explain_spike(loss, params, batch=(make(x), make(y)), **settings)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("size", [None, 3])
def test_examples_are_ranked_with_their_layers(make, size):
    found = explained(make, microbatch_size=size)
    assert [example.place for example in found.examples] == [2, 0, 3, 1]
    first, second, third, last = found.examples
    assert first.norm == pytest.approx(math.hypot(25.0, 0.5))
    assert [(layer.name, layer.norm) for layer in second.layers] == [("w", 5.0), ("b", 1.0)]
    assert [layer.share for layer in second.layers] == pytest.approx([25 / 26, 1 / 26])
    assert [(layer.name, layer.norm, layer.share) for layer in third.layers] == [("b", 4.0, 1.0), ("w", 0.0, 0.0)]
    assert (last.norm, last.loss) == pytest.approx((math.hypot(2.0, 2.0), 2.0))
    median = (math.hypot(5.0, 1.0) + 4.0) / 2
    assert (found.median, first.times) == pytest.approx((median, math.hypot(25.0, 0.5) / median))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_examples_that_are_not_finite_come_first_and_touch_no_other(make):
    x = X.copy()
    x[1] = [math.nan, 1.0]
    found = explained(make, x)
    assert [example.place for example in found.examples] == [1, 2, 0, 3]
    assert [example.finite for example in found.examples] == [False, True, True, True]
    assert math.isnan(found.examples[0].loss)
    assert found.median == pytest.approx(math.hypot(5.0, 1.0))
    assert str(found).splitlines()[:2] == [
        "4 examples, median norm 5.099, 1 not finite",
        "  example 1: norm nan, not finite in b and 1 more, loss nan",
    ]


def test_masked_examples_are_left_out_and_others_keep_their_places():
    found = explained(jnp.asarray, mask=np.array([True, False, False, True]))
    assert [example.place for example in found.examples] == [0, 3]


def test_one_argument_with_a_batch_and_one_for_all():
    found = gradclip.explain_spike(
        lambda params, x, scale: (params * x).sum() * scale,
        jnp.ones(2),
        batch=(jnp.asarray(X), jnp.float32(2.0)),
        batch_argnums=1,
    )
    assert [example.norm for example in found.examples] == [100.0, 10.0, 2.0, 0.0]
    assert found.examples[0].layers[0].name == "all"
    alone = gradclip.explain_spike(lambda params, x: (params * x).sum(), jnp.ones(2), batch=jnp.asarray(X))
    assert [example.norm for example in alone.examples] == [50.0, 5.0, 1.0, 0.0]


def test_a_batch_may_be_a_list_or_a_dict():
    params, x, y = {"w": jnp.zeros(2), "b": jnp.float32(0.0)}, jnp.asarray(X), jnp.asarray(Y)
    for given, fun in (([x, y], loss), ({"x": x, "y": y}, lambda params, both: loss(params, **both))):
        assert [example.place for example in gradclip.explain_spike(fun, params, batch=given).examples] == [2, 0, 3, 1]


def test_zeros_and_numbers_near_the_end_of_the_range():
    found = gradclip.explain_spike(lambda w, x: (w * x).sum(), jnp.ones(2), batch=jnp.array([[0.0, 0.0], [1e30, 1e30]]))
    assert [example.norm for example in found.examples] == pytest.approx([2**0.5 * 1e30, 0.0], rel=1e-6)
    assert math.isnan(found.examples[1].layers[0].share)
    nothing = gradclip.explain_spike(lambda w, x: (w * x).sum(), jnp.ones(2), batch=jnp.zeros((3, 2)))
    assert [math.isnan(example.times) for example in nothing.examples] == [True] * 3
    assert "example 0: norm 0, loss 0" in str(nothing)


def test_keys_and_aux_go_as_in_clipped_grad():
    def noisy(w, x, key):
        return (w * x).sum() * jax.random.normal(key, ()), x.sum()

    found = gradclip.explain_spike(
        noisy, jnp.ones(2), batch=(jnp.asarray(X), jax.random.key(0)), prng_argnum=2, has_aux=True
    )
    assert len({example.norm for example in found.examples}) == 4


def test_an_empty_batch_has_no_examples():
    found = explained(jnp.asarray, X[:0], Y[:0])
    assert (found.examples, str(found)) == ((), "0 examples, median norm nan")


def test_errors_are_those_of_clipped_grad():
    with pytest.raises(ValueError, match="batch"):
        explained(jnp.asarray, X, Y[:3])
    with pytest.raises(TypeError, match="module"):
        gradclip.explain_spike(loss, torch.nn.Linear(2, 1), batch=(torch.tensor(X), torch.tensor(Y)))
    with pytest.raises(TypeError, match="explain_spike needs values, got a traced array"):
        jax.jit(lambda x: explained(jnp.asarray, x) and 0)(X)
