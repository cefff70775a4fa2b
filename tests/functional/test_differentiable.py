"""Layers of traced JAX arrays, clipped together: each as it is alone, and little to trace for each."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradclip

THRESHOLD = 0.75


def tree_of(dtypes, count=9, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(), (3,), (0, 2), (2, 5), (17,)]
    leaves = {}
    for i in range(count):
        values = rng.normal(size=shapes[i % len(shapes)]) * 10.0 ** (i % 4 - 2)
        leaves[f"leaf{i}"] = jnp.asarray(values).astype(dtypes[i % len(dtypes)])
    return leaves


def bits(x):
    x = np.asarray(x)
    return x.shape, str(x.dtype), x.tobytes()


def all_bits(tree):
    return [bits(leaf) for leaf in jax.tree.leaves(tree)]


def equations(jaxpr):
    """Return the number of equations in a program, those of the functions in it included."""
    return sum(1 + sum(map(equations, programs_in(eqn.params))) for eqn in jaxpr.eqns)


def programs_in(params):
    found = [getattr(value, "jaxpr", value) for value in jax.tree.leaves(params)]
    return [program for program in found if hasattr(program, "eqns")]


@pytest.mark.parametrize(
    ("ord", "nonfinite", "wide"),
    [(2, "propagate", False), (2, "zero", True), (3, "drop", True), (math.inf, "drop", False)],
)
def test_each_layer_as_it_is_alone(ord, nonfinite, wide):
    options = {"ord": ord, "nonfinite": nonfinite}
    alone = jax.jit(lambda t, c: {name: gradclip.clip_by_global_norm(x, c, **options) for name, x in t.items()})
    together = jax.jit(lambda t, c: gradclip.clip_by_layer_norm(t, c, **options))
    with jax.enable_x64(wide):
        tree = tree_of(["float32", "float16", "complex64", "bfloat16", *["float64", "complex128"] * wide])
        tree["bad"] = jnp.array([1.0, math.nan, math.inf, -3.0], jnp.float32)
        tree["tiny"] = jnp.full(3, 1e-40, jnp.float32)
        if wide:
            tree["large"], tree["small"] = jnp.full(3, 1e200), jnp.full(3, 1e-310)
        known = jax.jit(lambda t: gradclip.clip_by_layer_norm(t, THRESHOLD, **options))(tree)
        traced = together(tree, THRESHOLD)
        assert all_bits(known) == all_bits(traced)
        clipped, norms = traced
        if nonfinite != "zero":
            assert all_bits(norms) == all_bits(jax.jit(lambda t: gradclip.layer_norms(t, ord))(tree))
        for name, (result, norm) in alone(tree, THRESHOLD).items():
            assert (bits(clipped[name]), bits(norms[name])) == (bits(result), bits(norm)), name


def test_prefixes_with_thresholds_of_all_kinds():
    tree = {"a": tree_of(["float32"], 4), "b": tree_of(["float16", "float32"], 3, 1), "c": jnp.full(4, 3.0), "d": []}
    clip = jax.jit(lambda t, c, n: gradclip.clip_by_layer_norm(t, {"a": c, "b": 0.5, "c": n, "d": c * 2}))
    clipped, norms = clip(tree, jnp.float32(0.25), jnp.int32(2))
    for name, threshold in {"a": 0.25, "b": 0.5, "c": 2, "d": 0.5}.items():
        result, norm = gradclip.clip_by_global_norm(tree[name], threshold)
        assert (all_bits(clipped[name]), bits(norms[name])) == (all_bits(result), bits(norm))


def test_a_threshold_is_not_rounded_to_the_dtype_of_another():
    tree = {"a": jnp.ones(2), "b": jnp.array([1e9])}
    clip = jax.jit(lambda t, c, n: gradclip.clip_by_layer_norm(t, {"a": c, "b": n})[0])
    clipped = clip(tree, jnp.float16(0.5), jnp.int32(100_000))  # which is infinity in float16
    assert float(clipped["b"][0]) == pytest.approx(100_000, rel=1e-6)


def test_rows_under_vmap():
    tree = tree_of(["float32", "float16"])
    rows = jax.tree.map(lambda x: jnp.stack([x, x * 0.5, x * 20]), tree)
    thresholds = jnp.array([1.0, 0.25, 3.0])
    found = jax.jit(jax.vmap(gradclip.clip_by_layer_norm))(rows, thresholds)
    shared = jax.jit(jax.vmap(gradclip.clip_by_layer_norm, in_axes=(0, None)))(rows, 0.25)
    for i in range(3):
        row = jax.tree.map(lambda x, i=i: x[i], (rows, found, shared))
        assert all_bits(row[1]) == all_bits(gradclip.clip_by_layer_norm(row[0], thresholds[i]))
        assert all_bits(row[2]) == all_bits(gradclip.clip_by_layer_norm(row[0], 0.25))


@pytest.mark.parametrize("ord", [1, 2, 3, math.inf])
def test_derivatives_are_those_of_each_layer(ord):
    tree = {"a": jnp.array([3.0, -4.0]), "b": jnp.array([0.1, 0.2, -0.3]), "c": jnp.array([[2.0, 1.0]], jnp.float16)}

    def together(tree, c):
        return gradclip.clip_by_layer_norm(tree, c, ord=ord), gradclip.layer_norms(tree, ord)

    def apart(tree, c):
        clipped = {name: gradclip.clip_by_global_norm(x, c, ord=ord) for name, x in tree.items()}
        norms = {name: gradclip.global_norm(x, ord) for name, x in tree.items()}
        return (
            {name: x for name, (x, _) in clipped.items()},
            {name: norm for name, (_, norm) in clipped.items()},
        ), norms

    def derivatives(function):
        """Return the gradients of a sum, and the changes along a direction, by one program."""
        total = lambda *at: sum(jnp.sum(jnp.cos(x).astype(jnp.float32)) for x in jax.tree.leaves(function(*at)))
        along = jax.tree.map(jnp.cos, tree), jnp.float32(1.0)
        found = jax.jit(lambda *at: (jax.grad(total, (0, 1))(*at), jax.jvp(function, at, along)[1]))
        return jax.tree.leaves(found(tree, 1.5))

    for x, y in zip(derivatives(together), derivatives(apart), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3 if x.dtype == jnp.float16 else 1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("function", "most"),
    [
        (lambda t, c: gradclip.clip_by_layer_norm(t, 1.0), 25),
        (gradclip.clip_by_layer_norm, 25),
        (lambda t, c: gradclip.layer_norms(t), 5),
    ],
)
def test_little_is_traced_for_each_layer(function, most):
    few, many = ({i: jnp.ones(i + 2) for i in range(count)} for count in (10, 30))
    traced = [equations(jax.make_jaxpr(function)(tree, 1.0).jaxpr) for tree in (few, many)]
    assert (traced[1] - traced[0]) / 20 <= most
