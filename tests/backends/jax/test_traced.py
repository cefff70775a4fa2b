"""What XLA makes of the operations without the kernels, as on accelerators: counts beside optax, and exact results."""

import itertools
import math
import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export

import gradclip
import gradclip._src.backends.jax.host as jax_backend
from frameworks import numpy_dtype
from rational import at_most, random_leaf, random_threshold

SHAPES = [(512, 768), (768,), (768, 1024), (1024,), (512, 768), (768,)]
SMALLEST = 768
SIZES = (1, 17, 40, 5, 3)
NARROW = ("float16", "bfloat16", "float32")
WIDE = ("float64", "complex128")


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch):
    monkeypatch.setattr(jax_backend, "usable", lambda leaves: False)


def gradients(dtype, blocks=1):
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in SHAPES * blocks]


def compiled(function, tree):
    return jax.jit(function).lower(tree).compile()


def fusions(program):
    return program.as_text().count(" fusion(")


def lines(function, tree):
    return export.export(jax.jit(function), platforms=("cuda", "tpu"))(tree).mlir_module().count("\n")


def clip(tree, **options):
    return gradclip.clip_by_global_norm(tree, 1.0, **options)[0]


def clip_of_optax(tree):
    return optax.clip_by_global_norm(1.0).update(tree, optax.EmptyState())[0]


def written(program):
    """Return how many elements each float64 array has that the program writes."""
    main = program.as_text().split("\nENTRY ")[1]
    shapes = re.findall(r"= f64\[([\d,]*)\]", main)
    return [math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes]


@pytest.mark.parametrize("dtype", [*NARROW, "float64"])
def test_counts_beside_optax(dtype):
    with jax.enable_x64(dtype == "float64"):
        tree = gradients(dtype)
        ours, theirs = compiled(clip, tree), compiled(clip_of_optax, tree)
        many = gradients(dtype, blocks=25)
        assert lines(clip, many) <= 2 * lines(clip_of_optax, many)
    assert ours.cost_analysis()["bytes accessed"] <= 1.1 * theirs.cost_analysis()["bytes accessed"]
    assert ours.memory_analysis().temp_size_in_bytes < SMALLEST * 4
    assert fusions(ours) <= 1.5 * fusions(theirs)
    assert dtype == "float64" or max(written(ours)) < SMALLEST


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_counts_of_what_is_traced_on_another_device(monkeypatch, dtype):
    theirs = compiled(clip_of_optax, gradients(dtype))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    ours = compiled(lambda tree: clip(tree), gradients(dtype))  # a new function, of which JAX has kept nothing
    size = sum(jnp.dtype(dtype).itemsize * math.prod(shape) for shape in SHAPES)
    assert "constant(1.4012984643248171e-45)" not in ours.as_text()  # no bits are read there
    assert ours.cost_analysis()["bytes accessed"] <= 3.1 * size
    assert fusions(ours) <= 1.5 * fusions(theirs)
    assert max(written(ours)) < 512 * 768


OPTIONS = [{"ord": 1}, {"ord": 3}, {"ord": math.inf}, {"nonfinite": "drop"}, {"nonfinite": "zero"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_leaf_is_read_twice_and_written_once(options):
    program = compiled(lambda tree: clip(tree, **options), gradients("bfloat16"))
    size = sum(2 * math.prod(shape) for shape in SHAPES)
    assert program.cost_analysis()["bytes accessed"] <= 3.1 * size
    assert max(written(program)) < SMALLEST


MIXTURES = [*[(dtype,) for dtype in (*NARROW, "complex64")], NARROW, WIDE, (*NARROW, *WIDE)]


@pytest.mark.parametrize("dtypes", MIXTURES, ids=str)
def test_the_bound_in_exact_arithmetic(dtypes):
    rng = np.random.default_rng(len(dtypes))
    orders = [ord for ord in (1, 2, 3, math.inf) if real(dtypes, ord)]
    below = lambda tree, limit, ord: gradclip.clip_by_global_norm(tree, limit, ord=ord)[0]
    call = jax.jit(lambda trees, limits: list(map(below, trees, limits, orders)))
    with jax.enable_x64(True):
        for _ in range(30):
            trees = [random_tree(rng, real(dtypes, ord)) for ord in orders]
            limits = [np.float64(random_threshold(rng, tree, ord)) for tree, ord in zip(trees, orders, strict=True)]
            for leaves, limit, ord, results in zip(trees, limits, orders, call(trees, limits), strict=True):
                kept = all(np.asarray(y).tobytes() == x.tobytes() for x, y in zip(leaves, results, strict=True))
                assert kept or at_most(list(map(np.asarray, results)), ord, limit)


def real(dtypes, ord):
    """Return the dtypes without complex ones, unless it is order 2: a complex magnitude is no rational number."""
    return [dtype for dtype in dtypes if ord == 2 or "complex" not in dtype]


def random_tree(rng, dtypes):
    return [random_leaf(rng, dtype, size) for size, dtype in zip(SIZES, itertools.cycle(dtypes), strict=False)]


NORMS = {1: 7, 2: 5, math.inf: 4, -math.inf: 3}
# A function of its own: JAX keeps what other tests have traced of gradclip's, with the kernels.
clip_to = jax.jit(lambda x, limit, ord: gradclip.clip_by_global_norm(x, limit, ord=ord), static_argnames="ord")


def below_normal(dtype):
    """Return two subnormal numbers, and their norm of each order."""
    step = float(jnp.finfo(dtype).smallest_subnormal)
    return np.array([3 * step, -4 * step]).astype(numpy_dtype(dtype)), [norm * step for norm in NORMS.values()]


@jax.jit
def clip_in_each_order(x, limits):
    return [gradclip.clip_by_global_norm(x, limits[i], ord=ord) for i, ord in enumerate(NORMS)]


def test_subnormal_numbers_of_float16_count():
    x, norms = below_normal("float16")
    with jax.enable_x64(True):
        kept = clip_in_each_order(x, np.multiply(1.001, norms))
        limits = np.multiply(0.999, norms)
        smaller = clip_in_each_order(x, limits)
        layers = jax.jit(lambda tree: [gradclip.layer_norms(tree, ord)[0] for ord in NORMS])([x, 2 * x])
    assert [float(found) for _, found in kept] == norms == list(map(float, layers))
    assert all(np.asarray(one).tobytes() == x.tobytes() for one, _ in kept)
    for ord, limit, (result, _) in zip(NORMS, limits, smaller, strict=True):
        assert ord < 0 or at_most([np.asarray(result)], ord, limit)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_others_may_count_as_zero_and_the_bound_holds(dtype):
    with jax.enable_x64(True):
        x, norms = below_normal(dtype)
        tiny = float(jnp.finfo(dtype).tiny)
        for limits in (np.multiply(0.5, norms), np.multiply(0.999, norms), [tiny] * len(norms)):
            results = clip_in_each_order(x, np.array(limits))
            for ord, norm, limit, (result, found) in zip(NORMS, norms, limits, results, strict=True):
                assert 0.0 <= np.float64(found) <= norm
                assert ord < 0 or at_most([np.asarray(result)], ord, limit)
        # Nothing is clipped above the most that the two can add to a norm.
        kept = clip_in_each_order(x, np.add(2.001 * tiny, norms))
    assert all(np.asarray(one).tobytes() == x.tobytes() for one, _ in kept)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_many_that_may_count_as_zero_beside_one_that_does_not(dtype):
    """A norm that is read as 1 step of the smallest normal number, and is 5: the bound needs what is not read."""
    tiny = float(jnp.finfo(dtype).tiny)
    x = np.array([tiny, *[tiny / 2] * 96]).astype(numpy_dtype(dtype))
    with jax.enable_x64(True):
        for limit in (tiny, 1.5 * tiny, 4.999 * tiny):
            result, _ = clip_to(jnp.asarray(x), limit, ord=2)
            assert at_most([np.asarray(result)], 2, limit)


FINITE = (*NARROW, "float64")


@jax.jit
def clip_by_each_policy(trees):
    return [{name: clip(tree, nonfinite=name) for name in ("propagate", "drop", "zero")} for tree in trees]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_policies(bad):
    trees = [[np.array(pair).astype(numpy_dtype(dtype)) for pair in ([3.0, bad], [-0.0, 4.0])] for dtype in FINITE]
    with jax.enable_x64(True):
        found = clip_by_each_policy(trees)
    for dtype, results in zip(FINITE, found, strict=True):
        assert all(np.isnan(np.float64(x)).all() for x in results["propagate"])
        assert not any(np.float64(x).any() for x in results["drop"])
        zeroed = np.concatenate(list(map(np.float64, results["zero"])))
        assert zeroed[1] == 0
        np.testing.assert_allclose(zeroed[[0, 3]], [0.6, 0.8], rtol=20 * float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("limit", [5.0 * (1 + 1e-6), 1e30, math.inf])
def test_what_is_not_clipped_keeps_its_bits(limit):
    trees = []
    for dtype in FINITE:
        tiny = float(jnp.finfo(dtype).smallest_subnormal)
        trees.append([np.array(x).astype(numpy_dtype(dtype)) for x in ([3.0, -0.0, tiny, -3 * tiny], 4.0)])
    with jax.enable_x64(True):
        results = jax.jit(lambda trees: [gradclip.clip_by_global_norm(tree, limit)[0] for tree in trees])(trees)
    assert [np.asarray(x).tobytes() for tree in results for x in tree] == [x.tobytes() for tree in trees for x in tree]


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("max_norm", [2**24 + 3, 2**31 - 1, 2**53 + 3, 2**63 - 1])
def test_an_integer_as_threshold_does_not_grow(monkeypatch, platform, max_norm):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    with jax.enable_x64(True):
        x = np.array([max_norm], np.float32 if platform == "tpu" else np.float64)
        for call in (
            lambda g, c: gradclip.clip_by_global_norm(g, c, ord=math.inf)[0],
            lambda g, c: gradclip.clip_by_value(g, c),
        ):
            found = float(jax.jit(call)([x], jnp.int64(max_norm))[0][0])
            assert max_norm * (1 - 3e-6) <= Fraction(found) <= max_norm


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e39, 1 + 2.0**-25])
def test_a_wide_threshold_does_not_grow_where_all_is_computed_in_float32(monkeypatch, max_norm):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    x = np.array([max_norm, max_norm / 2]).clip(max=3e38).astype(np.float32)
    with jax.enable_x64(True):
        for call in (
            lambda g, c: gradclip.clip_by_global_norm(g, c, ord=math.inf)[0],
            lambda g, c: gradclip.clip_by_value(g, c),
        ):
            found = jax.jit(call)([x], jnp.float64(max_norm))[0]
            assert float(np.abs(found).max()) <= max_norm
            assert float(np.abs(found).max()) >= min(max_norm, 3e38) * (1 - 3e-6)
        slope = jax.jit(jax.grad(lambda c: gradclip.clip_by_global_norm([x], c)[0][0].sum()))(jnp.float64(max_norm))
        assert jnp.isfinite(slope)
        assert slope > 0 or max_norm > 1e38
