"""Gradients in factors of examples that lie on several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradclip._src.private.ghost.jax.taps import JaxTaps
from sharded_jax.layouts import AxisType, P, mesh_of, placed

RNG = np.random.default_rng(0)
SHAPES = {"b": (3,), "u": (4, 4), "w": (5, 4), "v": (4, 3)}
PARAMETERS = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
X = RNG.standard_normal((16, 6, 5)).astype(np.float32)


def loss(p, x):
    h, _ = jax.lax.scan(lambda h, x: (jnp.tanh(h @ p["u"] + x), None), x[0, :4] * 0, x @ p["w"])
    return jnp.sum((h @ p["v"] + p["b"]) ** 2), ()


def gradients(p, x):
    b, *products = JaxTaps().run(loss, 0, (p, x), (None, 0), [False, True, True, True]).gradients
    return [b.rows, *(jnp.einsum("bgtr,bgtc->brc", *one[0].terms[0]) for one in products)]


def assert_right(found):
    expected, _ = jax.vmap(jax.grad(loss, has_aux=True), (None, 0))(PARAMETERS, X)
    for a, b in zip(found, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("checked", [True, False])
def test_each_device_has_the_gradients_of_its_own_examples(checked):
    """Cotangents that are summed over devices would be those of no example."""
    mesh = mesh_of((8,), AxisType.Auto)
    sharded = jax.shard_map(gradients, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x"), check_vma=checked)
    assert_right(jax.jit(sharded)(PARAMETERS, X))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_gradients_stay_where_the_examples_are(kind):
    mesh = mesh_of((8,), kind)
    with jax.set_mesh(mesh):
        p, x = placed(mesh, [P(), P("x")], [PARAMETERS, X])
        known = JaxTaps().uses(loss, 0, (p, x), (None, 0))
        assert [one.reason for one in known] == ["add", "", "", ""]
        found = jax.jit(lambda p, x: JaxTaps().run(loss, 0, (p, x), (None, 0), [False, True, True, True])[1])(p, x)
        assert found.sharding.spec == P("x")
        assert_right(jax.jit(gradients)(p, x))
