"""The kernels inside of compiled JAX programs: the bits of eager calls, one call for all leaves, any transformation."""

import math
import os
import re
import subprocess
import sys
import textwrap
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradclip
from frameworks import DTYPES, numpy_dtype

NARROW = tuple(dtype for dtype in DTYPES if dtype not in ("float64", "complex128"))
ORDERS = (1, 1.5, 2, 3, 10, math.inf, -math.inf)
SIZES = (1, 17, 65537)


def numbers(dtype, size, scale=1.0):
    rng = np.random.default_rng(size)
    values = rng.standard_normal(size) * scale
    values = values + 1j * values[::-1] if "complex" in dtype else values
    with np.errstate(over="ignore"):
        return values.astype(numpy_dtype(dtype))


def tree_of(dtype, scale=1.0):
    leaves = [jnp.asarray(numbers(dtype, size, scale)) for size in SIZES]
    return {"arrays": leaves, "empty": jnp.zeros((0, 3), leaves[0].dtype), "scalar": leaves[0][0]}


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def compiled_text(function, *args, **options):
    return jax.jit(function, **options).lower(*args).compile().as_text()


def in_new_process(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def jitted_norms(ord):
    """Return a function that is compiled once for the trees of all dtypes, whatever the size of the numbers."""
    return jax.jit(lambda trees, thresholds: list(map(partial(norm_twice, ord=ord), trees, thresholds)))


def norm_twice(tree, threshold, ord):
    return gradclip.global_norm(tree, ord), gradclip.clip_by_global_norm(tree, threshold, ord=ord)[1]


def assert_jitted_is_eager(trees, ord):
    norms = [gradclip.global_norm(tree, ord) for tree in trees]
    found = jitted_norms(ord)(trees, [float(norm) / 3 for norm in norms])
    assert list(map(bits, found)) == [bits([norm, norm]) for norm in norms]


@pytest.mark.parametrize("ord", ORDERS)
def test_norms_have_the_bits_of_eager_calls(ord):
    assert_jitted_is_eager([tree_of(dtype) for dtype in NARROW], ord)


@pytest.mark.parametrize("ord", ORDERS)
@pytest.mark.parametrize(("scale", "scale_of_narrow"), [(1e-200, 1e-3), (1.0, 1.0), (1e200, 1e3)])
def test_norms_have_the_bits_of_eager_calls_in_64_bit_mode(ord, scale, scale_of_narrow):
    with jax.enable_x64(True):
        trees = [tree_of(dtype, scale_of_narrow if dtype in NARROW else scale) for dtype in DTYPES]
        assert_jitted_is_eager(trees, ord)


@pytest.mark.parametrize("ord", [1, 2, 3, math.inf])
def test_clipped_leaves_have_the_bits_of_eager_calls(ord):
    trees = [tree_of(dtype) for dtype in ("float32", "complex64")]
    thresholds = [float(gradclip.global_norm(tree, ord)) / 3 for tree in trees]
    clip = lambda trees: [gradclip.clip_by_global_norm(t, c, ord=ord) for t, c in zip(trees, thresholds, strict=True)]
    assert bits(jax.jit(clip)(trees)) == bits(clip(trees))


@jax.jit
def extreme_and_summed_norms(x):
    return [gradclip.global_norm(x, ord) for ord in (1, 2, math.inf, -math.inf)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_subnormal_numbers_count(dtype):
    tiny = float(jnp.finfo(dtype).smallest_subnormal)
    x = np.array([3 * tiny, 4 * tiny]).astype(numpy_dtype(dtype))
    assert list(map(float, extreme_and_summed_norms(x))) == [7 * tiny, 5 * tiny, 4 * tiny, 3 * tiny]


@jax.jit
def norm_and_blanked_in_each_order(tree):
    return [(gradclip.global_norm(tree, ord), clip_or_skip(tree, ord)) for ord in (1, 2, 3, math.inf, -math.inf)]


def clip_or_skip(tree, ord):
    return gradclip.clip_by_global_norm(tree, 1.0, ord=ord, nonfinite="drop")[0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_shows(value):
    for norm, clipped in norm_and_blanked_in_each_order([np.ones(70000), np.array([1.0, value]), np.ones(3)]):
        assert math.isnan(norm) or (norm == math.inf == value)
        assert all(not np.asarray(leaf).any() for leaf in clipped)


def test_trees_without_elements_have_norm_zero():
    for tree in ({}, [jnp.zeros((0, 4))], [None]):
        clipped, norm = jax.jit(lambda t: gradclip.clip_by_global_norm(t, 1.0))(tree)
        assert float(norm) == 0.0
        assert jax.tree.structure(clipped) == jax.tree.structure(tree)


def test_a_thousand_leaves_in_one_call():
    tree = [jnp.full((3,), float(i % 7)) for i in range(1000)]
    norm = lambda t: gradclip.global_norm(t)
    assert bits(jax.jit(norm)(tree)) == bits(norm(tree))
    assert jax.jit(norm).lower(tree).as_text().count("stablehlo.custom_call") == 1


@pytest.mark.parametrize("ord", [1, 2, 3])
def test_one_call_reads_all_and_nothing_is_summed_beside_it(ord):
    trees = [tree_of(dtype) for dtype in ("float32", "float16", "bfloat16", "complex64")]
    clip = lambda trees: [gradclip.clip_by_global_norm(tree, 1.0, ord=ord) for tree in trees]
    text = compiled_text(clip, trees)
    assert len(re.findall(r" custom-call\(", text)) == len(trees)
    assert " reduce(" not in text


def test_donated_memory_is_not_written_where_nothing_is_clipped():
    values = numbers("float32", 100001)
    clip = jax.jit(lambda x, c: gradclip.clip_by_global_norm(x, c), donate_argnums=0)
    for threshold, factor in ((1e9, 1.0), (1.0, 1.0 / np.linalg.norm(values.astype(np.float64)))):
        x = jnp.asarray(values)
        clipped, _ = clip(x, threshold)
        assert x.is_deleted()
        np.testing.assert_allclose(clipped, values * factor, rtol=1e-6, atol=1e-40)


@pytest.mark.parametrize("ord", [1, 2, 3, math.inf, -math.inf])
def test_vmap_gives_the_bits_of_each_row(ord):
    rows = [
        {"a": numbers(dtype, 5 * 6 * 7).reshape(5, 6, 7), "b": numbers(dtype, 5)} for dtype in ("float32", "bfloat16")
    ]
    clip = lambda trees: [gradclip.clip_by_global_norm(tree, 1.5, ord=ord) for tree in trees]
    one_row = jax.jit(clip)
    expected = [bits(one_row(row_of(rows, i))) for i in range(5)]
    found = jax.tree.map(np.asarray, jax.jit(jax.vmap(clip))(rows))
    assert [bits(row_of(found, i)) for i in range(5)] == expected
    assert bits(jax.vmap(one_row)(rows)) == bits(found)
    # What is not compiled takes one operation of XLA after the other, which are the same for other dtypes.
    assert bits(jax.vmap(clip)(rows[:1])) == bits(found[:1])


def row_of(tree, i):
    return jax.tree.map(lambda leaf: leaf[i], tree)


def test_vmap_over_other_axes_and_some_leaves_and_twice():
    a, b, c = (numbers("float32", n) for n in (60, 12, 4))
    a, b = a.reshape(4, 3, 5), b.reshape(4, 3)
    norm = lambda a, b, c: gradclip.global_norm([a, b, c])
    found = jax.vmap(jax.vmap(norm, (1, None, 0), 0), (None, 0, None), 1)(a, b, c[:3])
    expected = [[norm(*map(jnp.asarray, (a[:, i], b[j], c[i]))) for j in range(4)] for i in range(3)]
    assert bits(found) == bits(np.array(expected))
    assert jax.vmap(norm, (0, None, None))(np.zeros((0, 3), np.float32), b, c).shape == (0,)


def test_rows_of_float64_that_need_different_divisors():
    with jax.enable_x64(True):
        rows = jnp.array([[3e200, 4e200], [3.0, 4.0], [3e-200, 4e-200], [0.0, 0.0], [math.inf, 1.0]])
        found = jax.jit(jax.vmap(gradclip.global_norm))(rows)
        np.testing.assert_allclose(found, [5e200, 5.0, 5e-200, 0.0, math.inf], rtol=1e-15)


def test_examples_of_a_batch_have_the_norms_of_each():
    grads = {"a": jnp.asarray(numbers("float32", 6 * 40).reshape(6, 40)), "b": jnp.ones((6, 2, 2))}
    eager, info = gradclip.per_example_clip(grads, 3.0)
    summed, jitted = jax.jit(lambda g: gradclip.per_example_clip(g, 3.0))(grads)
    np.testing.assert_allclose(jitted.norms, info.norms, rtol=2e-7)
    assert int(jitted.num_clipped) == int(info.num_clipped)
    for key in grads:
        np.testing.assert_allclose(summed[key], eager[key], rtol=1e-6)


@pytest.mark.parametrize("rule", ["clip", "normalize", "automatic"])
def test_examples_are_added_up_in_one_call_with_the_bits_of_eager_calls(rule):
    dtypes = "float32", "float16", "bfloat16", "complex64"
    batches = [{"a": numbers(dtype, 6 * 400).reshape(6, 20, 20), "b": numbers(dtype, 6)} for dtype in dtypes]
    mask = np.arange(6) > 0
    clip = lambda gs, c, m: [gradclip.per_example_clip(g, c, mask=m, rule=rule) for g in gs]
    eager = lambda gs: bits(clip(jax.tree.map(jnp.asarray, gs), 3.0, mask))
    program = jax.jit(clip).lower(batches, 3.0, mask).compile()
    assert bits(program(batches, 3.0, mask)) == eager(batches)
    assert len(re.findall(r" custom-call\(", program.as_text())) == len(batches)
    rows = jax.tree.map(lambda x: np.stack([x, 2 * x]), batches)
    found = jax.tree.map(np.asarray, jax.jit(jax.vmap(clip, (0, None, None)))(rows, 3.0, mask))
    assert bits(jax.tree.map(lambda x: x[1], found)) == eager(jax.tree.map(lambda x: 2 * x, batches))
    if rule == "clip":
        assert bits(jax.vmap(clip, (0, None, None))(rows, 3.0, mask)) == bits(found)


GRADIENTS = {
    "by operations": jax.grad,
    "compiled": lambda function: jax.jit(jax.grad(function)),
    "of what is compiled": lambda function: jax.grad(jax.jit(function)),
    "computed again": lambda function: jax.jit(jax.grad(jax.checkpoint(function))),
}


@pytest.mark.parametrize("how", GRADIENTS)
def test_gradients_are_those_of_the_formula(how):
    expected = {
        1: [1.0, -1.0],
        2: [0.6, -0.8],
        3: [9 / 91 ** (2 / 3), -16 / 91 ** (2 / 3)],
        math.inf: [0.0, -1.0],
        -math.inf: [1.0, 0.0],
    }
    given = [jnp.array([3.0, -4.0])] * len(expected)
    total = lambda given: sum(gradclip.global_norm(x, ord) for x, ord in zip(given, expected, strict=True))
    np.testing.assert_allclose(GRADIENTS[how](total)(given), list(expected.values()), rtol=1e-6)


def test_examples_can_be_differentiated():
    grads = jnp.array([[3.0, 4.0], [0.3, 0.4]])
    total = lambda g: gradclip.per_example_clip(g, 1.0)[0].sum()
    # (x + y) / |(x, y)| changes by (y - x) * (y, -x) / |(x, y)|**3 where it is clipped.
    np.testing.assert_allclose(jax.grad(total)(grads), [[4 / 125, -3 / 125], [1.0, 1.0]], rtol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.jacfwd(total))(grads), [[4 / 125, -3 / 125], [1.0, 1.0]], rtol=1e-5)
    norms = lambda c: gradclip.per_example_clip(grads, c)[0].sum()
    np.testing.assert_allclose(jax.jit(jax.grad(norms))(1.0), 7 / 5, rtol=1e-6)
    zeros = jax.grad(lambda g: gradclip.per_example_clip(g, 1.0)[0].sum())(jnp.zeros((2, 2)))
    np.testing.assert_array_equal(zeros, np.ones((2, 2)))
    largest = lambda g: gradclip.grad_norm([SimpleNamespace(grad=g)], math.inf)
    np.testing.assert_allclose(jax.jit(jax.grad(largest))(grads), [[0.0, 1.0], [0.0, 0.0]])


def test_second_derivatives_and_loops():
    x = jnp.array([3.0, 4.0])
    np.testing.assert_allclose(
        jax.hessian(gradclip.global_norm)(x), [[16 / 125, -12 / 125], [-12 / 125, 9 / 125]], rtol=1e-5
    )
    total, _ = jax.lax.scan(lambda sofar, row: (sofar + gradclip.global_norm(row), None), 0.0, jnp.ones((4, 9)))
    assert float(total) == 12.0
    assert jax.eval_shape(gradclip.global_norm, x).dtype == jnp.float32
    assert "gradclip_power_sums" in str(jax.make_jaxpr(gradclip.global_norm)(x))


def test_sizes_that_are_symbols_are_exported():
    (n,) = jax.export.symbolic_shape("n")
    exported = jax.export.export(jax.jit(gradclip.global_norm))(jax.ShapeDtypeStruct((n,), jnp.float32))
    assert float(exported.call(jnp.array([3.0, 4.0]))) == 5.0


CLIP = """
    import jax, jax.numpy as jnp, numpy as np, gradclip
    tree = [jnp.arange(8.0), jnp.full((4, 2), 3.0)]
    clip = jax.jit(lambda t: gradclip.clip_by_global_norm(t, 1.0))
    text = clip.lower(tree).compile().as_text()
    assert ("custom-call" in text) is {called}, text
    clipped, norm = clip(tree)
    assert abs(float(norm) - np.sqrt(140 + 72)) < 1e-5, norm
    assert abs(float(gradclip.global_norm(clipped)) - 1) < 1e-5
"""


def test_one_device_calls_the_kernels():
    exec(textwrap.dedent(CLIP.format(called=True)), {})


def test_several_devices_do_without():
    sharded = """
    mesh = jax.make_mesh((4,), ("d",))
    spread = jax.device_put(tree, jax.NamedSharding(mesh, jax.sharding.PartitionSpec("d")))
    text = clip.lower(spread).compile().as_text()
    assert "custom-call" not in text and "all-gather" not in text, text
    assert abs(float(clip(spread)[1]) - np.sqrt(140 + 72)) < 1e-5
    """
    code = CLIP.format(called=False) + sharded
    in_new_process(code, XLA_FLAGS="--xla_force_host_platform_device_count=4", JAX_PLATFORMS="cpu")


def test_without_kernels_programs_can_be_exported():
    exported = """
    assert float(jax.export.export(clip)(tree).call(tree)[1]) == float(norm)
    """
    in_new_process(CLIP.format(called=False) + exported, GRADCLIP_NATIVE="0")
