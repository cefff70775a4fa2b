"""What calls have shown of a loss, and what is promised by it: elements, and dtypes of results."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import pytest
import torch
from tests.support.sum_layouts import with_layout

import gradclip
from gradclip import clipped_sum_sensitivity


def dot(w, x):
    return (w * x).sum()


def promise(**settings):
    return clipped_sum_sensitivity(1.0, **with_layout(settings))


def promised_by(clipped, **settings):
    """What a clipped function promises where shapes and places stay, without the words for this condition."""
    found = clipped.sensitivity("zero_out", **with_layout(settings))
    return dataclasses.replace(found, relation="add_or_remove_one", note="", keeps_places=False)


@pytest.mark.parametrize("make", [jnp.asarray, torch.tensor, jax.jit], ids=["jax", "torch", "jit"])
def test_elements_are_counted_in_calls(make):
    clipped = gradclip.clipped_grad(lambda p, x: dot(p["a"], x) + p["b"].sum(), 1.0, method="materialize")
    array = jnp.asarray if make is jax.jit else make
    call = jax.jit(clipped) if make is jax.jit else clipped
    before = promised_by(clipped, batch_size=4)
    assert before == promise(batch_size=4)
    call({"a": array([1.0, 2.0]), "b": array([[1.0, 1.0]])}, array([[3.0, 4.0]]))
    assert promised_by(clipped, batch_size=4) == promise(batch_size=4, elements=4)
    call({"a": array([1.0]), "b": array(1.0)}, array([[3.0]]))
    assert promised_by(clipped, batch_size=4) == promise(batch_size=4, elements=4)
    assert promised_by(clipped, batch_size=4, elements=9) == promise(batch_size=4, elements=9)


def test_elements_of_parameters():
    clipped = gradclip.clipped_grad(dot, 1.0, method="materialize")
    params = {"w": torch.zeros(3, 4), "c": torch.zeros(5, dtype=torch.complex64)}
    assert promised_by(clipped, batch_size=4, elements=params) == promise(batch_size=4, elements=22)
    billions = jax.ShapeDtypeStruct((2**35,), jnp.float32)
    huge = promised_by(clipped, batch_size=256, elements=billions)
    assert huge.rounding > 256 * 2.0**-17


def test_a_promise_for_fewer_elements_than_a_call_has_is_named(monkeypatch):
    monkeypatch.setattr("gradclip._src.private.functions.settings.ASSUMED_ELEMENTS", 3)
    clipped = gradclip.clipped_grad(dot, 1.0, method="materialize")
    promised_by(clipped, batch_size=4)
    clipped(torch.ones(3), torch.ones(1, 3))
    clipped = gradclip.clipped_grad(dot, 1.0, method="materialize")
    promised_by(clipped, batch_size=4)
    with pytest.warns(
        RuntimeWarning, match="This batch has 4 elements per example.*or pass layout=gradclip.SumLayout\\(elements="
    ):
        clipped(torch.ones(4), torch.ones(1, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clipped(torch.ones(4), torch.ones(1, 4))


def test_results_in_a_half_type_are_promised_as_such():
    from gradclip.integrations import jax_privacy

    loss = lambda w, x: (w * x).sum()
    fun = jax_privacy.clipped_grad(loss, l2_clip_norm=1.0)
    fun(jnp.ones(3, jnp.bfloat16), jnp.ones((4, 3), jnp.bfloat16))
    found = promised_by(fun.clipped, batch_size=4)
    assert found == promise(batch_size=4, elements=3, partial_sums_in="bfloat16")
    assert found.rounding > 2 * 4 * 2.0**-8
    fun = jax_privacy.clipped_grad(loss, l2_clip_norm=1.0)
    promised_by(fun.clipped, batch_size=4)
    with pytest.warns(RuntimeWarning, match="the narrowest of them bfloat16"):
        fun(jnp.ones(3, jnp.bfloat16), jnp.ones((4, 3), jnp.bfloat16))


def test_replacing_a_setting_forgets_what_was_seen():
    clipped = gradclip.clipped_grad(dot, 1.0, method="materialize")
    clipped(torch.ones(3), torch.ones(1, 3))
    other = dataclasses.replace(clipped, microbatch_size=2)
    assert promised_by(other, batch_size=2) == promise(batch_size=2)


def loss(w, x):
    return (w * x).sum()


def test_elements_are_counted_of_arrays():
    with pytest.raises(TypeError, match=r"elements must be a number of elements or a tree of arrays, .* got 'many'"):
        gradclip.clipped_grad(loss, 1.0, pad_to=8).sensitivity(layout=gradclip.SumLayout(elements="many"))
