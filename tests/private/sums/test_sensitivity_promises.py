"""What `sensitivity()` promises, and where nothing bounds what one example can do."""

import dataclasses
import math

import jax.numpy as jnp
import pytest
import torch

import gradclip
from gradclip.integrations import jax_privacy

RELATIONS = ("add_or_remove_one", "replace_one", "zero_out")


def loss(w, x):
    return (x * w).sum()


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize(("policy", "why"), [("propagate", "one NaN makes all of it NaN"), ("raise", "error reveals")])
@pytest.mark.parametrize("settings", [{}, {"pad_to": 8}, {"microbatch_size": 2}])
def test_policies_that_tell_of_one_example_promise_nothing(relation, policy, why, settings):
    for promise in (
        gradclip.clipped_grad(loss, 1.0, nonfinite=policy, **settings).sensitivity(relation, batch_size=8),
        gradclip.clipped_fun(lambda x: x, 1.0, nonfinite=policy, **settings).sensitivity(relation),
        gradclip.clipped_sum_sensitivity(1.0, relation, nonfinite=policy, batch_size=8),
    ):
        assert promise.bound == math.inf
        assert why in str(promise)
        with pytest.raises(
            ValueError, match=f"no noise can hide one example: under nonfinite='{policy}' .*pass nonfinite='drop'"
        ):
            promise.noise_std(1.0)


@pytest.mark.parametrize("policy", ["drop", "zero"])
def test_policies_that_tell_of_none_promise(policy):
    assert gradclip.clipped_grad(loss, 1.5, nonfinite=policy, pad_to=8).sensitivity().bound == 1.5
    with pytest.raises(ValueError, match="nonfinite must be one of"):
        gradclip.clipped_sum_sensitivity(1.0, nonfinite="ignore")


def test_jax_privacy_without_nan_safe_promises_nothing():
    for make in (jax_privacy.clipped_fun, jax_privacy.clipped_grad):
        safe, unsafe = (make(loss, l2_clip_norm=2.0, nan_safe=safe) for safe in (True, False))
        assert (safe.sensitivity(), safe.l2_norm_bound) == (2.0, 2.0)
        assert (unsafe.sensitivity(), unsafe.l2_norm_bound) == (math.inf, math.inf)
        assert unsafe.clipped.sensitivity("zero_out").bound == math.inf


def test_where_batches_change_their_shape_nothing_is_promised():
    clipped = gradclip.clipped_grad(loss, 1.0)
    promise = clipped.sensitivity(batch_size=8)
    assert promise.bound == math.inf
    what_to_pass = r"Pass clipped_grad pad_to=.* or microbatch_size=\."
    with pytest.raises(ValueError, match=rf"the shape of the batch.* {what_to_pass}"):
        promise.noise_std(1.0)
    with pytest.raises(ValueError, match="Pass clipped_fun pad_to="):
        gradclip.clipped_fun(lambda x: x, 1.0, unit="group").sensitivity().noise_std(1.0)
    for relation, bound in (("replace_one", 2.0), ("zero_out", 1.0)):
        assert clipped.sensitivity(relation).bound == bound
        assert "batches with the same number of examples" in str(clipped.sensitivity(relation))


IN_PLACE = " that keep their places, where mask= removes one"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pad_to": 8}, "batches padded to 8 examples" + IN_PLACE),
        ({"pad_to": 5}, "batches padded to 5 examples" + IN_PLACE),
        ({"method": "loop"}, "examples computed one at a time"),
        ({"method": "loop", "microbatch_size": 3}, "examples computed one at a time"),
        ({"method": "loop", "prng_argnum": 2}, "examples computed one at a time" + IN_PLACE),
        ({"microbatch_size": 1}, "examples computed one at a time"),
        ({"microbatch_size": 1, "prng_argnum": 2}, "examples computed one at a time" + IN_PLACE),
        ({"microbatch_size": 24}, "microbatches of 24 examples" + IN_PLACE),
        ({"microbatch_size": 3}, "microbatches of 3 examples" + IN_PLACE),
        ({"microbatch_size": 8, "pad_to": 20}, "microbatches of 8 examples" + IN_PLACE),
        ({"pad_to": 8, "grid": 10**6}, "batches padded to 8 examples" + IN_PLACE),
    ],
)
def test_batches_of_one_shape(settings, words):
    promise = gradclip.clipped_grad(loss, 1.0, **settings).sensitivity()
    assert (promise.bound, promise.note, promise.keeps_places) == (1.0, words, words.endswith(IN_PLACE))
    assert str(promise).endswith(f"; {words}")


@pytest.mark.parametrize("relation", ["replace_one", "zero_out"])
@pytest.mark.parametrize(("settings", "places"), [({}, True), ({"pad_to": 8}, True), ({"method": "loop"}, False)])
def test_batches_of_one_size(relation, settings, places):
    promise = gradclip.clipped_grad(loss, 1.0, **settings).sensitivity(relation)
    assert promise.keeps_places is places
    assert promise.note == "batches with the same number of examples" + " that keep their places" * places


def test_what_is_padded_to_bounds_the_rounding():
    padded = gradclip.clipped_grad(loss, 1.0, pad_to=256, method="materialize")
    known = gradclip.clipped_sum_sensitivity(1.0, batch_size=256)
    assert dataclasses.replace(padded.sensitivity(), note="", keeps_places=False) == known
    assert padded.sensitivity(batch_size=8).rounding < known.rounding
    assert padded.sensitivity().noise_std(1.1) == known.noise_std(1.1)


@pytest.mark.parametrize("make", [jnp.asarray, torch.as_tensor], ids=["jax", "torch"])
@pytest.mark.parametrize(
    "settings", [{"pad_to": 5}, {"pad_to": 5, "microbatch_size": 2}, {"microbatch_size": 3}], ids=str
)
def test_padding_adds_nothing_and_comes_back_nowhere(make, settings):
    """A loss that is not finite for rows of zeros, of which no trace may be left."""

    def reciprocal(w, x):
        return (w / x).sum(), {"x": x[0], "sum": x.sum()}

    w, rows = make([1.0, 1.0]), make([[2.0, 4.0], [0.5, 8.0], [1.0, 1.0]])
    clipped = gradclip.clipped_grad(reciprocal, 100.0, has_aux=True, return_values=True, return_norms=True, **settings)
    for count, mask in ((3, None), (2, None), (1, None), (3, [True, True, False])):
        summed, outputs = clipped(w, rows[:count], mask=mask)
        kept = 2 if mask else count
        assert summed.tolist() == [sum([0.5, 2.0, 1.0][:kept]), sum([0.25, 0.125, 1.0][:kept])]
        assert outputs.values.tolist() == [0.75, 2.125, 2.0][:kept] + [0.0] * (count - kept)
        assert outputs.aux["sum"].shape == outputs.norms.shape == (count,)
        assert outputs.aux["x"].shape == (count, 2)
    summed, outputs = clipped(w, rows[:0])
    assert summed.tolist() == [0.0, 0.0]
    assert outputs.aux["x"].shape == (0, 2)


@pytest.mark.parametrize("make", [jnp.asarray, torch.as_tensor], ids=["jax", "torch"])
def test_more_examples_than_it_pads_to(make):
    with pytest.raises(ValueError, match="the batch has 3 examples, more than pad_to=2"):
        gradclip.clipped_grad(loss, 1.0, pad_to=2)(make([1.0]), make([[1.0], [2.0], [3.0]]))
    for wrong, error in ((0, ValueError), (2.5, ValueError), (True, TypeError)):
        with pytest.raises(error, match="pad_to"):
            gradclip.clipped_grad(loss, 1.0, pad_to=wrong)


def test_keys_and_labels_are_padded():
    import jax

    def fun(w, x, label, keys):
        noise = jax.random.normal(keys[0], (2,))
        return (w * x * noise)[:, label].sum()

    keys = jax.random.split(jax.random.key(0), 3)
    args = jnp.ones(2), jnp.ones((3, 2)), jnp.asarray([0, 1, 1]), keys
    plain = gradclip.clipped_grad(fun, 100.0, batch_argnums=(1, 2, 3))(*args)
    for settings in ({"pad_to": 8}, {"microbatch_size": 2}):
        padded = jax.jit(gradclip.clipped_grad(fun, 100.0, batch_argnums=(1, 2, 3), **settings))(*args)
        assert jnp.allclose(padded, plain, rtol=1e-6)


def test_a_grid_is_promised_before_any_call():
    clipped = gradclip.clipped_fun(lambda x: x, 1.0, batch_argnums=0, grid=4, pad_to=8)
    assert clipped.sensitivity().bound == 1.0
    with pytest.raises(ValueError, match="too coarse for 1000 elements"):
        clipped.sensitivity(layout=gradclip.SumLayout(elements=1000))
