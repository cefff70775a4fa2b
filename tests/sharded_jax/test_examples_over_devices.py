"""Batches of examples that lie on several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradclip
from sharded_jax.layouts import AxisType, P, mesh_of, placed, run

RNG = np.random.default_rng(0)
GRADS = [RNG.standard_normal((16, 5, 3)).astype(np.float32), RNG.standard_normal((16, 7)).astype(jnp.bfloat16)]
MASK = np.arange(16) % 3 > 0
W = RNG.standard_normal((5, 3)).astype(np.float32)
X, Y = RNG.standard_normal((16, 5)).astype(np.float32), RNG.standard_normal((16, 3)).astype(np.float32)
KINDS = [AxisType.Auto, AxisType.Explicit]


def loss(w, x, y):
    return jnp.sum((jnp.tanh(x @ w) - y) ** 2)


def clipped_grad(**options):
    return gradclip.clipped_grad(loss, argnums=0, batch_argnums=(1, 2), max_norm=1.0, **options)


def assert_close(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"per_layer": True}, {"rule": "automatic"}], ids=str)
def test_per_example_clip(kind, options):
    mesh = mesh_of((8,), kind)
    clip = lambda grads, mask: gradclip.per_example_clip(grads, 1.0, mask=mask, **options)
    with jax.set_mesh(mesh):
        found, sent = run(clip, placed(mesh, [P("x"), P("x")], GRADS), *placed(mesh, [P("x")], [MASK]))
    assert_close(found, clip(GRADS, MASK))
    # Sums of the leaves, and the count.
    assert set(sent) == {"all-reduce"}
    assert sent["all-reduce"] <= 4
    norms = jax.tree.leaves(found[1].norms)
    assert all(x.sharding.spec == P("x") for x in norms)


@pytest.mark.parametrize("kind", KINDS)
def test_clipped_grad(kind):
    mesh = mesh_of((8,), kind)
    with jax.set_mesh(mesh):
        found, sent = run(clipped_grad(), *placed(mesh, [P(), P("x"), P("x")], [W, X, Y]))
    assert_close(found, clipped_grad()(jnp.asarray(W), X, Y))
    assert set(sent) == {"all-reduce"}


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("options", [{}, {"microbatch_size": 1}, {"microbatch_size": 3, "return_norms": True}], ids=str)
def test_clipped_grad_inside_of_shard_map(checked, options):
    """Each device clips its own examples; the sums are added up by the caller."""

    def total(w, x, y):
        summed = clipped_grad(**options)(w, x, y)
        return jax.lax.psum(summed[0] if "return_norms" in options else summed, "x")

    mesh = mesh_of((4,), AxisType.Auto)
    call = jax.shard_map(total, mesh=mesh, in_specs=(P(), P("x"), P("x")), out_specs=P(), check_vma=checked)
    found, sent = run(call, W, X, Y)
    assert_close(found, clipped_grad()(jnp.asarray(W), X, Y))
    assert sent == {"all-reduce": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_vmap_over_a_sharded_axis(kind):
    mesh = mesh_of((8,), kind)
    (x,) = placed(mesh, [P("x")], GRADS[:1])
    with jax.set_mesh(mesh):
        (clipped, norms), sent = run(jax.vmap(lambda g: gradclip.clip_by_global_norm(g, 1.0)), x)
    assert set(sent) <= {"all-reduce"}
    for one, norm, grad in zip(np.asarray(clipped), norms, GRADS[0], strict=True):
        wanted, length = gradclip.clip_by_global_norm(grad, 1.0)
        np.testing.assert_allclose(one, wanted, rtol=2e-6)
        np.testing.assert_allclose(norm, length, rtol=2e-6)
