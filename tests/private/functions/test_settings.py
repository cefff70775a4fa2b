"""What a clipped function is asked for: its method, and what its sensitivity assumes of gradients in factors."""

import dataclasses
import inspect
import pickle
import re
import typing
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tests.support.sum_layouts import with_layout

import gradclip
from gradclip._src.private.functions.settings import FunctionSettings
from gradclip._src.private.ghost.certificate import rounding_of_sum
from gradclip._src.private.sums.settings import PerExampleSettings


def loss(w, x):
    return (x @ w).sum()


FRAMEWORKS = {"jax": jnp.asarray, "torch": torch.tensor}


def arguments(framework, width=64, examples=8):
    rng = np.random.default_rng(0)
    shapes = (width, width), (examples, 3, width)
    return [FRAMEWORKS[framework](rng.standard_normal(shape).astype(np.float32)) for shape in shapes]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_settings_that_need_gradients_are_named(framework):
    for settings, why in [
        ({"grid": 2**20}, "grid= rounds the gradient of each example"),
        ({"nonfinite": "zero"}, "nonfinite='zero' changes elements of gradients"),
        ({"pre_clipping_transform": lambda g: g}, "pre_clipping_transform= changes the gradient of each example"),
    ]:
        with pytest.raises(ValueError, match=f"method='ghost' is not possible here: {re.escape(why)}"):
            gradclip.clipped_grad(loss, 1.0, method="ghost", **settings)
        made = gradclip.clipped_grad(loss, 1.0, **settings).plan(*arguments(framework))
        assert [leaf.how for leaf in made.leaves] == ["autograd"]
        assert made.leaves[0].why == why


def test_results_are_not_clipped_in_factors():
    with pytest.raises(ValueError, match="method='ghost' is not possible here: clipped_fun clips results"):
        gradclip.clipped_fun(lambda x: x, 1.0, method="ghost")


@pytest.mark.parametrize("method", ["vmap", "", None, 1, "GHOST"])
def test_unknown_methods(method):
    with pytest.raises(ValueError, match="method must be one of 'auto', 'materialize', 'ghost', 'loop', got"):
        gradclip.clipped_grad(loss, 1.0, method=method)


def roundings(clipped, **settings):
    return clipped.sensitivity(**with_layout({"batch_size": 256, "elements": 4096} | settings)).rounding


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_sensitivity_counts_what_factors_round(framework):
    made, ghost, auto = (
        gradclip.clipped_grad(loss, 2.0, pad_to=256, method=method) for method in ("materialize", "ghost", "auto")
    )
    extra = 2.0 * 256 * float(rounding_of_sum(256, cancels=True))
    # Before the first call, all gradients may come in factors.
    assert roundings(ghost) == roundings(auto) == pytest.approx(roundings(made) + extra, rel=1e-6)
    ghost(*arguments(framework))
    assert roundings(ghost) == pytest.approx(roundings(made) + extra, rel=1e-6)
    auto(*arguments(framework, width=8))
    assert roundings(auto) == roundings(made)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_one_term_rounds_less(framework):
    params, x = arguments(framework)
    ghost = gradclip.clipped_grad(loss, 2.0, pad_to=256, method="ghost")
    ghost(params, x[:, 0])
    extra = 2.0 * 256 * float(rounding_of_sum(256, cancels=False))
    made = gradclip.clipped_grad(loss, 2.0, pad_to=256, method="materialize")
    assert roundings(made) < roundings(ghost) <= roundings(made) + 1.01 * extra


def test_microbatches_round_less():
    whole, parts = (
        gradclip.clipped_grad(loss, 1.0, method="ghost", **settings) for settings in ({}, {"microbatch_size": 32})
    )
    made = gradclip.clipped_grad(loss, 1.0, method="materialize", microbatch_size=32)
    extra = 256 * float(rounding_of_sum(32, cancels=True))
    assert roundings(parts) == pytest.approx(roundings(made) + extra, rel=1e-6)
    assert extra < 256 * float(rounding_of_sum(256, cancels=True)) / 7
    assert roundings(whole, relation="replace_one") > 0


def test_a_promise_that_was_too_small_is_told():
    auto = gradclip.clipped_grad(loss, 1.0, pad_to=256)
    auto(*arguments("torch", width=8))
    auto.sensitivity()
    with pytest.warns(RuntimeWarning, match="fewer gradients came in factors than in this batch. Call sensitivity"):
        auto(*arguments("torch", width=256, examples=256))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        auto.sensitivity()
        auto(*arguments("torch", width=256, examples=256))


RECORDS = (FunctionSettings, PerExampleSettings)
OF_RESULTS = {"argnums", "return_values", "pre_clipping_transform"}  # which results do not have


@pytest.mark.parametrize(("function", "lacks"), [(gradclip.clipped_grad, set()), (gradclip.clipped_fun, OF_RESULTS)])
def test_the_arguments_are_the_settings_with_their_types_and_defaults(function, lacks):
    settings = {field.name: field.default for kind in RECORDS for field in dataclasses.fields(kind) if field.init}
    types = typing.get_type_hints(FunctionSettings) | typing.get_type_hints(PerExampleSettings)
    arguments = {name: one.default for name, one in inspect.signature(function).parameters.items()}
    assert settings.keys() - {"_settings", "_assumed"} - lacks == arguments.keys()
    for name in arguments.keys() - {"argnums", "batch_argnums", "microbatch_size"}:  # other types, and own defaults
        default = inspect.Parameter.empty if settings[name] is dataclasses.MISSING else settings[name]
        assert (name, types[name], default) == (name, typing.get_type_hints(function)[name], arguments[name])


def test_what_is_asked_for_is_kept_and_shown():
    asked = {"rule": "automatic", "gamma": 0.5, "has_aux": True, "pad_to": 8, "normalize_by": 2.0, "unit": "group"}
    made = gradclip.clipped_grad(loss, 2.0, argnums=(0, 1), batch_argnums=2, microbatch_size="1 MiB", **asked)
    text = (
        f"ClippedFunction(fun={loss!r}, max_norm=2.0, per_layer=False, uniform=True, "
        "nonfinite='drop', rule='automatic', gamma=0.5, sum_dtype=None, grid=None, to_unit=False, argnums=(0, 1), "
        "batch_argnums=(2,), has_aux=True, keep_batch_dim=True, return_values=False, return_norms=False, "
        "pre_clipping_transform=None, microbatch_size=Memory(bytes=1048576), pad_to=8, normalize_by=2.0, "
        "prng_argnum=None, unit='group', method='auto')"
    )
    assert repr(made) == repr(pickle.loads(pickle.dumps(made))) == text
    results = gradclip.clipped_fun(lambda x: x, 2.0)
    assert (results.argnums, results.batch_argnums, results._assumed) == (None, (0,), True)
