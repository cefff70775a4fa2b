"""`method="loop"` beside `vmap`: the same sums, outputs and errors."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip
from losses import loss, problem, same

MASK = np.array([True, False, True, True, True, False, False])


SETTINGS = [
    {"return_values": True, "return_norms": True},
    {"per_layer": True, "keep_batch_dim": False, "return_norms": True},
    {"nonfinite": "zero", "rule": "automatic", "normalize_by": 4.0},
]


def both_ways(make, settings, mask):
    """Return what `vmap` and the loop make of the problem."""
    params, x, y = problem(jnp.asarray if make is jax.jit else make)
    if settings.get("nonfinite") == "zero":
        x[4, 1] = math.nan
    for method in ("materialize", "loop"):
        clipped = gradclip.clipped_grad(loss, 1.0, batch_argnums=(1, 2), has_aux=True, method=method, **settings)
        yield (jax.jit(clipped) if make is jax.jit else clipped)(params, x, y, mask=mask)


@pytest.mark.parametrize("size", [None, 1, 3])
@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "masked"])
@pytest.mark.parametrize("settings", SETTINGS, ids=["outputs", "layers", "rule"])
def test_the_loop_does_what_vmap_does(size, mask, settings):
    by_vmap, by_loop = both_ways(torch.tensor, settings | {"microbatch_size": size}, mask)
    same(by_loop, by_vmap)


@pytest.mark.parametrize("make", [jnp.asarray, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("settings", [SETTINGS[0], SETTINGS[1] | {"microbatch_size": 3}], ids=["whole", "parts"])
def test_the_loop_of_jax_does_what_vmap_does(make, settings):
    by_vmap, by_loop = both_ways(make, settings, MASK)
    same(by_loop, by_vmap)


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("make", [torch.tensor, jnp.asarray], ids=["torch", "jax"])
def test_batches_of_no_example_and_of_one(make, count):
    params, x, y = problem(make)
    sums = [
        gradclip.clipped_grad(loss, 1.0, batch_argnums=(1, 2), has_aux=True, return_norms=True, method=method)(
            params, x[:count], y[:count]
        )
        for method in ("materialize", "loop", "ghost", "auto")
    ]
    for one in sums[1:]:
        same(one, sums[0])
    assert sums[1][1].norms.shape == (count,)


@pytest.mark.parametrize("make", [torch.tensor, jnp.asarray], ids=["torch", "jax"])
def test_several_arguments_groups_and_results(make):
    params, x, y = problem(make)

    def split(w, x, y, b):
        return loss({"w": w, "b": b}, x, y)[0]

    for settings in ({"argnums": (3, 0)}, {"argnums": (0,)}):
        calls = [
            gradclip.clipped_grad(split, 1.0, batch_argnums=(1, 2), method=method, **settings)(
                params["w"], x, y, params["b"]
            )
            for method in ("materialize", "loop")
        ]
        assert isinstance(calls[1], tuple)
        same(calls[1], calls[0])
    totals = [gradclip.clipped_fun(lambda x: {"s": x.sum(0)}, 1.0, method=m)(x) for m in ("materialize", "loop")]
    same(totals[1], totals[0])


def test_the_sum_that_a_client_trains_for():
    def update(x):
        w = torch.zeros(2, requires_grad=True)
        torch.nn.functional.softplus(-(x @ w).sum()).backward()
        return w.grad

    summed = gradclip.clipped_fun(update, 1.0, keep_batch_dim=False, method="loop")(torch.tensor([[6.0, 8.0], [1, 0]]))
    torch.testing.assert_close(summed, torch.tensor([-0.6 - 0.5, -0.8]))


def test_dropout_is_drawn_for_each_example():
    torch.manual_seed(0)
    clipped = gradclip.clipped_grad(lambda p, x: (p * torch.nn.functional.dropout(x)).sum(), 1e6, method="loop")
    kept = clipped(torch.ones(64), torch.ones(16, 64)) / 2.0
    assert 0.0 < kept.min() < kept.max() < 16.0


@pytest.mark.parametrize("method", ["materialize", "loop"])
def test_an_error_of_the_function_itself_stays(method):
    def wrong(params, x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        gradclip.clipped_grad(wrong, 1.0, method=method)(torch.ones(2), torch.ones(3, 2))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        gradclip.clipped_grad(lambda p, x: x @ p, 1.0, method=method)(torch.ones(3, 3), torch.ones(3, 2))


def test_unknown_methods_are_an_error():
    with pytest.raises(ValueError, match="method must be one of 'auto', 'materialize', 'ghost', 'loop', got 'map'"):
        gradclip.clipped_grad(loss, 1.0, method="map")
    assert gradclip.clipped_grad(loss, 1.0, batch_argnums=(1, 2), method="loop").sensitivity().bound == 1.0
