"""Sharded arrays under jit and eagerly: the norm of one device, shardings kept, nothing gathered, one reduction."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip
from gradclip.integrations.optax import clip_by_global_norm as optax_clip
from sharded_jax.layouts import AxisType, P, assert_bound, assert_same, draw, mesh_of, placed, run

ORDERS = [1, 2, 3, math.inf, -math.inf]
KINDS = [AxisType.Auto, AxisType.Explicit]


@pytest.fixture(autouse=True)
def doubles():
    with jax.enable_x64(True):
        yield


def clip(tree, ord=2, **options):
    return gradclip.clip_by_global_norm(tree, 0.5, ord=ord, **options)


def split_axes(layout):
    """Return the different sets of mesh axes over which leaves are split."""
    sets = {frozenset(n for e in spec if e for n in (e if isinstance(e, tuple) else (e,))) for spec in layout.specs}
    return sets - {frozenset()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_as_on_one_device(seed, kind):
    layout = draw(seed, kind)
    ord = ORDERS[seed % len(ORDERS)]
    with jax.set_mesh(layout.mesh):
        (results, norm), sent = run(lambda tree: clip(tree, ord), layout.tree)
    assert_same(results, norm, *clip(layout.whole, ord))
    assert_bound(results, ord, 0.5)
    for result, x in zip(results, layout.tree, strict=True):
        assert result.sharding.is_equivalent_to(x.sharding, x.ndim)
    assert set(sent) <= {"all-reduce"}
    if kind is AxisType.Explicit:
        assert sent["all-reduce"] == min(1, len(split_axes(layout)))
    else:
        # One for float32 and narrower leaves, two for float64 ones. XLA may send the parts of leaves that are split
        # over two axes along one of them first.
        assert sent["all-reduce"] <= 6 * len(split_axes(layout))


@pytest.mark.parametrize("kind", KINDS)
def test_one_reduction_for_float32_leaves_split_alike(kind):
    mesh = mesh_of((8,), kind)
    tree = placed(mesh, [P("x")] * 20, [np.full((8, 3), i, np.float32) for i in range(20)])
    with jax.set_mesh(mesh):
        _, sent = run(gradclip.global_norm, tree)
    assert sent == {"all-reduce": 1}


def test_the_norm_of_parameters_is_one_reduction():
    mesh = mesh_of((4, 2), AxisType.Explicit)
    tree = placed(mesh, [P("x", "y"), P("x")], [np.arange(32.0, dtype=np.float32).reshape(8, 4), np.ones(8)])

    def norm_of(tree):
        return gradclip.grad_norm([SimpleNamespace(grad=x) for x in tree])

    with jax.set_mesh(mesh):
        norm, sent = run(norm_of, tree)
    assert float(norm) == pytest.approx(math.sqrt(sum(i * i for i in range(32)) + 8), rel=1e-6)
    assert sent == {"all-reduce": 1}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [3])
def test_eagerly(seed, kind):
    layout = draw(seed, kind)
    with jax.set_mesh(layout.mesh):
        results, norm = clip(layout.tree)
    assert_same(results, norm, *clip(layout.whole))
    for result, x in zip(results, layout.tree, strict=True):
        assert result.sharding.is_equivalent_to(x.sharding, x.ndim)


@pytest.mark.parametrize("kind", KINDS)
def test_layer_by_layer(kind):
    layout = draw(1, kind)
    with jax.set_mesh(layout.mesh):
        results, norms = jax.jit(lambda tree: gradclip.clip_by_layer_norm(tree, 0.5))(layout.tree)
    for result, norm, x in zip(results, norms, layout.whole, strict=True):
        (wanted,), expected = clip([x])
        assert_same([result], norm, [wanted], expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1e-320, 1e200, 1.5e308])
def test_float64_near_the_ends_of_its_range(kind, scale):
    mesh = mesh_of((8,), kind)
    (x,) = placed(mesh, [P("x")], [np.full(8, scale)])
    with jax.set_mesh(mesh):
        clipped, norm = jax.jit(lambda x: gradclip.clip_by_global_norm(x, 1e-150))(x)
    if scale == 1e-320:
        assert norm < 1e-307
        assert np.array_equal(clipped, x)
    elif scale < 1e308:
        assert float(norm) == pytest.approx(scale * math.sqrt(8), rel=1e-14)
    else:
        assert np.isinf(norm)
    if scale > 1e-150:
        assert 0.99999e-150 < math.hypot(*map(float, clipped)) <= 1e-150


@pytest.mark.parametrize("kind", KINDS)
def test_subnormal_float32_may_count_as_zero(kind):
    mesh = mesh_of((8,), kind)
    values = np.full(8, 1e-40, np.float32)
    (x,) = placed(mesh, [P("x")], [values])
    with jax.set_mesh(mesh):
        clipped, norm = jax.jit(lambda x: gradclip.clip_by_global_norm(x, 2e-40))(x)
        kept, _ = jax.jit(lambda x: gradclip.clip_by_global_norm(x, 1e-37))(x)
    assert 0.0 <= float(np.asarray(norm)) <= float(np.float32(1e-40)) * math.sqrt(8) * (1 + 1e-4)
    assert_bound([clipped], 2, 2e-40)
    assert np.array_equal(np.asarray(kept).view(np.uint32), values.view(np.uint32))


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_that_is_not_finite(kind):
    mesh = mesh_of((8,), kind)
    values = np.arange(1.0, 9.0)
    values[5] = np.nan
    (x,) = placed(mesh, [P("x")], [values])
    with jax.set_mesh(mesh):
        spoiled, norm = jax.jit(lambda x: clip(x))(x)
        skipped, _ = jax.jit(lambda x: clip(x, nonfinite="drop"))(x)
        zeroed, _ = jax.jit(lambda x: clip(x, nonfinite="zero"))(x)
        with pytest.raises(FloatingPointError, match="1 NaN"):
            clip(x, nonfinite="raise")
    assert np.isnan(norm)
    assert np.isnan(spoiled).all()
    assert not np.any(skipped)
    expected, _ = clip(np.nan_to_num(values))
    np.testing.assert_allclose(zeroed, expected, rtol=1e-14)


def test_the_optax_transformation():
    mesh = mesh_of((4, 2), AxisType.Explicit)
    whole = {"w": np.full((8, 2), 3.0, np.float32), "b": np.full(8, 4.0, np.float32)}
    specs = {"w": P("x", "y"), "b": P()}
    tree = {key: placed(mesh, [specs[key]], [whole[key]])[0] for key in whole}
    transform = optax.chain(optax_clip(1.0), optax.sgd(1.0))
    with jax.set_mesh(mesh):
        updates, _ = jax.jit(lambda g: transform.update(g, transform.init(g)))(tree)
    length = math.sqrt(9 * 16 + 16 * 8)
    np.testing.assert_allclose(updates["w"], -whole["w"] / length, rtol=1e-6)
    assert updates["w"].sharding.spec == P("x", "y")


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_go_through(kind):
    mesh = mesh_of((8,), kind)
    whole = [np.arange(1.0, 9.0), np.arange(3.0)]
    tree = placed(mesh, [P("x"), P()], whole)

    def loss(tree):
        results, norm = gradclip.clip_by_global_norm(tree, 2.0)
        return norm + sum(jnp.sum(x**3) for x in results)

    with jax.set_mesh(mesh):
        found = jax.jit(jax.grad(loss))(tree)
    for result, wanted in zip(found, jax.grad(loss)(list(map(jnp.asarray, whole))), strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-12, atol=1e-15)
