"""JAX on the GPU: functional calls under `jit`, derivatives, and sums over examples."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip
from gradclip.integrations.optax import clip_by_global_norm
from on_gpu import ON
from rational import at_most, power_of_norm

pytestmark = pytest.mark.gpu
SHAPES = {"w": (300, 40), "b": (1001,), "s": (), "empty": (0, 3)}
SMALL = {"w": (13, 5), "b": (5,), "s": (), "empty": (0, 3)}
DTYPES = ("float32", "bfloat16", "float16")
TIGHT = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}


def tree_of(seed, dtypes, shapes=SMALL, scale=1.0):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.standard_normal(shape) * scale, dtype=dtypes[i % len(dtypes)])
        for i, (name, shape) in enumerate(shapes.items())
    }


def wide(tree):
    return [np.asarray(x).astype(np.float64) for x in jax.tree.leaves(tree)]


def norm_of(tree, ord=2):
    return float(gradclip.global_norm(wide(tree), ord))


def test_it_runs_on_the_gpu():
    assert jax.default_backend() == ON.jax
    clipped, _ = gradclip.clip_by_global_norm({"w": jnp.array([3.0, 4.0])}, 1.0)
    (device,) = clipped["w"].devices()
    assert device.platform == ON.jax
    np.testing.assert_allclose(clipped["w"], [0.6, 0.8], rtol=1e-6)


@pytest.mark.parametrize(
    ("dtypes", "ord"), [*(((dtype,), 2) for dtype in DTYPES), *((DTYPES, ord) for ord in (1, 2, math.inf))], ids=str
)
def test_the_bound_and_the_norm(dtypes, ord):
    tree = tree_of(0, dtypes, SHAPES if ord == 2 else SMALL)
    wanted = norm_of(tree, ord)
    call = jax.jit(lambda tree, max_norm: gradclip.clip_by_global_norm(tree, max_norm, ord=ord))
    for share in (1e-3, 0.5, 0.999, 2.0):
        max_norm = np.float32(wanted * share)
        clipped, norm = call(tree, max_norm)
        assert float(norm) == pytest.approx(wanted, rel=1e-6)
        assert at_most(wide(clipped), ord, float(max_norm))
        if share > 1:
            assert all(np.array_equal(x, y) for x, y in zip(wide(clipped), wide(tree), strict=True))
        elif ord == 2:
            tight = 1 - max(map(TIGHT.get, dtypes))
            assert power_of_norm(wide(clipped), 2) >= (float(max_norm) * tight) ** 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_thresholds(dtype):
    """Rounding to nearest would break the bound in half of the cases."""
    call = jax.jit(gradclip.clip_by_global_norm)
    for seed in range(6):
        tree = tree_of(10 + seed, (dtype,))
        for share in (1 - 2.0**-20, 0.7, 0.3, 0.01):
            max_norm = np.float32(norm_of(tree) * share)
            clipped, _ = call(tree, max_norm)
            assert at_most(wide(clipped), 2, float(max_norm))
            assert power_of_norm(wide(clipped), 2) >= (float(max_norm) * (1 - TIGHT[dtype])) ** 2


def test_eager_calls():
    tree = tree_of(17, ("float32",))
    clipped, norm = gradclip.clip_by_global_norm(tree, 0.5)
    assert float(norm) == pytest.approx(norm_of(tree), rel=1e-6)
    assert at_most(wide(clipped), 2, 0.5)
    np.testing.assert_allclose(wide(clipped)[1], wide(tree)[1] * (0.5 / norm_of(tree)), rtol=1e-5)


@pytest.mark.parametrize(("dtype", "scale"), [("float32", 1e30), ("float32", 1e-30), ("float16", 1e-6)])
def test_squares_that_overflow_or_underflow(dtype, scale):
    tree = {"w": jnp.full((64, 3), scale, dtype)}
    wanted = norm_of(tree)
    clipped, norm = jax.jit(gradclip.clip_by_global_norm)(tree, np.float32(wanted / 8))
    assert float(norm) == pytest.approx(wanted, rel=1e-6)
    assert at_most(wide(clipped), 2, float(np.float32(wanted / 8)))


@pytest.mark.parametrize("policy", ["propagate", "drop", "zero"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_policies(policy, bad):
    tree = {"a": jnp.array([3.0, bad, 4.0]), "b": jnp.array([12.0])}
    clipped, _ = jax.jit(lambda tree: gradclip.clip_by_global_norm(tree, 1.0, nonfinite=policy))(tree)
    found = np.concatenate(wide(clipped))
    wanted = {"propagate": [math.nan] * 4, "drop": [0.0] * 4, "zero": np.array([3, 0, 4, 12]) / 13}[policy]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_double_precision():
    with jax.enable_x64(True):
        tree = tree_of(1, ("float64", "float32"))
        clipped, norm = jax.jit(lambda tree: gradclip.clip_by_global_norm(tree, 0.5))(tree)
        assert norm.dtype == jnp.float64
        assert float(norm) == pytest.approx(norm_of(tree), rel=1e-13)
        assert at_most(wide(clipped), 2, 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_and_values(dtype):
    tree = tree_of(2, (dtype,))
    clipped, norms = jax.jit(lambda tree: gradclip.clip_by_layer_norm(tree, 0.5))(tree)
    assert all(at_most([x], 2, 0.5) for x in wide(clipped))
    for name, leaf in tree.items():
        assert float(norms[name]) == pytest.approx(norm_of([leaf]), rel=1e-6)
    clamped = jax.jit(lambda tree: gradclip.clip_by_value(tree, 0.1))(tree)
    assert all(np.abs(x).max(initial=0.0) <= 0.1 for x in wide(clamped))


@pytest.mark.parametrize("max_norm", [0.0, 1.0, 100.0])
def test_derivatives(max_norm):
    def total(x):
        clipped, norm = gradclip.clip_by_global_norm({"x": x}, max_norm)
        return (clipped["x"] * jnp.arange(1.0, 1.0 + x.size)).sum() + 3 * norm

    slope = jax.jit(jax.grad(total))
    assert np.isfinite(slope(jnp.zeros(5))).all()
    # At (3, 4) with norm 5: the derivative of the clipped part is that of x / |x|, or of x itself.
    x, weights = np.array([3.0, 4.0]), np.array([1.0, 2.0])
    own = max_norm * (weights / 5 - x * (weights @ x) / 125) if max_norm < 5 else weights
    np.testing.assert_allclose(slope(jnp.asarray(x)), own + 3 * x / 5, rtol=1e-5)


def test_vmap():
    rows = jnp.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    clipped = jax.jit(jax.vmap(lambda row: gradclip.clip_by_global_norm(row, 1.0)[0]))(rows)
    np.testing.assert_allclose(clipped, [[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]], rtol=1e-6)
    assert all(at_most([row], 2, 1.0) for row in wide(clipped)[0])


def loss(params, x, y):
    h = jnp.tanh(jnp.dot(x, params["w"], precision="highest") + params["b"])
    return ((jnp.dot(h, params["v"], precision="highest") - y) ** 2).sum()


@pytest.mark.parametrize("method", ["ghost", "auto", "materialize", "loop"])
def test_sums_over_examples(method):
    rng, count, width = np.random.default_rng(3), 12, 24
    shapes = {"w": (width, width), "b": (width,), "v": (width, width)}
    params = {name: jnp.asarray(rng.standard_normal(shape) / 5, jnp.float32) for name, shape in shapes.items()}
    x = jnp.asarray(rng.standard_normal((count, width)) * np.geomspace(0.1, 10, count)[:, None], jnp.float32)
    y = jnp.asarray(rng.standard_normal((count, width)), jnp.float32)
    each = [jax.tree.map(np.asarray, jax.grad(loss)(params, *one)) for one in zip(x, y, strict=True)]
    norms = [norm_of(one) for one in each]
    max_norm = sorted(norms)[count // 2] * 1.01
    clipped = gradclip.clipped_grad(
        loss, max_norm, batch_argnums=(1, 2), method=method, pad_to=count, keep_batch_dim=False, return_norms=True
    )
    found, outputs = clipped(params, x, y)
    np.testing.assert_allclose(outputs.norms, norms, rtol=1e-3)
    for name, value in found.items():
        wanted = sum(min(1.0, max_norm / n) * one[name].astype(np.float64) for n, one in zip(norms, each, strict=True))
        np.testing.assert_allclose(value, wanted, rtol=2e-3, atol=1e-3 * np.abs(wanted).max())
    alone = clipped(params, x, y, mask=jnp.arange(count) == count - 1)[0]
    assert at_most(wide(alone), 2, clipped.sensitivity().total)
    assert norm_of(alone) == pytest.approx(max_norm, rel=1e-3)


def test_examples_that_are_there():
    rows = jnp.array([[3.0, 4.0], [0.3, 0.4], [math.nan, 1.0]])
    found, info = jax.jit(lambda rows: gradclip.per_example_clip(rows, 1.0))(rows)
    np.testing.assert_allclose(found, [0.9, 1.2], rtol=1e-6)
    np.testing.assert_allclose(info.norms, [5.0, 0.5, math.nan], rtol=1e-6)
    assert int(info.num_clipped) == 1


def test_in_an_optax_chain():
    optimizer = optax.chain(clip_by_global_norm(1.0), optax.sgd(0.1))
    params = {"w": jnp.zeros(2)}
    updates, _ = jax.jit(optimizer.update)({"w": jnp.array([3.0, 4.0])}, optimizer.init(params))
    np.testing.assert_allclose(updates["w"], [-0.06, -0.08], rtol=1e-5)
