"""MLX's transformations, and a device without float64: nothing is read, and what comes out is right."""

import math

import mlx.core as mx
import numpy as np
import pytest

import fresh_process
import gradclip
from frameworks import MORE_OF_MLX, by_name
from gradclip._src.backends.mlx.lazy import Lazy
from gradclip._src.core.formats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from gradclip._src.core.norms import Order
from rational import at_most

NUMBERS = np.array([3.0, -4.0, 0.5], np.float32)
ON_THE_WAY = pytest.mark.parametrize("framework", MORE_OF_MLX, ids=by_name)


@ON_THE_WAY
@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [(1.0, "bfloat16", 54.772255), (1e20, "float32", 5.4772255e21), (1e-30, "float32", 5.4772255e-29)],
)
def test_norms_that_sums_of_squares_lose(framework, value, dtype, expected):
    x = framework.array(np.full(3000, value), dtype)
    clipped, norm = framework.call(lambda x: gradclip.clip_by_global_norm(x, 0.5 * expected), x)
    assert float(norm) == pytest.approx(expected, rel=1e-3 if dtype == "float32" and value < 1 else 4e-3)
    assert at_most([framework.to_numpy(clipped)], 2, 0.5 * expected)
    np.testing.assert_allclose(framework.to_numpy(clipped).astype(float), 0.5 * value, rtol=8e-3)


@ON_THE_WAY
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("ord", [1, 2, math.inf, -math.inf])
def test_policies(framework, at, value, ord):
    spoiled = np.insert(NUMBERS, at, np.float32(value))
    with framework.mode():
        for policy in ("propagate", "drop", "zero"):
            call = lambda x, policy=policy: gradclip.clip_by_global_norm(x, 0.25, ord=ord, nonfinite=policy)
            clipped, norm = (
                call(framework.array(spoiled)) if not framework.jit else mx.vmap(call)(framework.array(spoiled[None]))
            )
            found = framework.to_numpy(clipped).reshape(-1)
            kept = {"propagate": np.isnan(found), "drop": found == 0, "zero": np.isfinite(found)}[policy]
            assert kept.all(), (policy, found)
            if policy == "zero":
                assert found[at] == 0
                assert at_most([found], ord, 0.25)
            else:
                assert not math.isfinite(float(norm.item()))


def test_nothing_is_computed_while_mlx_compiles():
    # MLX raises for an array that somebody waits for.
    @mx.compile
    def step(x, c):
        tree, norm = gradclip.clip_by_global_norm({"x": x, "y": [x * 2]}, c)
        layers, norms = gradclip.clip_by_layer_norm({"x": x, "y": [x * 2]}, c)
        units, _ = gradclip.clip_by_unit_norm(x[None], c, unit_axis=0)
        limited, _ = gradclip.adaptive_grad_clip(x[None], x[None] * 0.1, unit_axis=0)
        return tree, norm, layers, norms, units, limited, gradclip.clip_by_value(x, c), gradclip.per_example_clip(x, c)

    tree, norm, *_ = step(mx.array(NUMBERS), mx.array(0.25))
    assert norm.item() == pytest.approx(math.hypot(*NUMBERS) * math.sqrt(5), rel=1e-6)
    np.testing.assert_allclose(tree["y"][0], NUMBERS * 2 * 0.25 / norm.item(), rtol=1e-6)


def test_policies_that_read_are_refused_while_mlx_compiles():
    for transform in (mx.compile, mx.vmap, lambda f: lambda x: mx.jvp(f, [x], [x])):
        with pytest.raises(ValueError, match="nonfinite='raise' needs the values of the gradients"):
            transform(lambda x: gradclip.clip_by_global_norm(x, 1.0, nonfinite="raise")[0])(mx.ones((2, 2)))


def test_what_was_computed_is_traced_all_the_same():
    def loss(x):
        mx.eval(x)  # an array with a value that mx.grad still follows
        return gradclip.clip_by_global_norm(x, 1.0)[0][0]

    np.testing.assert_allclose(mx.grad(loss)(mx.array([3.0, 4.0])), [0.128, -0.096], rtol=1e-6)


def test_the_adaptive_threshold_and_the_monitor_wait_for_nothing():
    rule = gradclip.SpreadRule()
    history = rule.init(mx.array(0.0))
    step = mx.compile(lambda x, c: gradclip.clip_by_global_norm(x, c))
    monitor = gradclip.Monitor()
    for scale in (1.0, 1.1, 0.9, 1.0, 50.0):
        limit = rule.max_norm(history)
        _, norm = step(mx.array(NUMBERS) * scale, limit)
        history = rule.observe(history, norm)
        monitor.record(norm, limit)
    assert monitor.steps == 5
    with pytest.raises(TypeError, match=r"the norm is traced: .* Call it outside jit or mx.compile"):
        mx.compile(gradclip.AdaptiveThreshold().observe)(mx.array(1.0))


@pytest.mark.parametrize("value", [0.1, 1e-50, 3.5e38, 1e300, math.inf, 2.0**-149])
def test_thresholds_are_not_rounded_up(value):
    device = Lazy(visible=True, wide=FLOAT32)
    for given in (value, mx.array(value, dtype=mx.float64)):
        found = device.scalar(given, ())
        assert found.dtype == mx.float32
        assert found.item() == FLOAT32.toward_zero(value)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("transform", [lambda f: f, mx.compile], ids=["eager", "compiled"])
def test_float32_is_not_rounded_up_to_half_types(transform, dtype):
    rng = np.random.default_rng(0)
    at_random = rng.integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    usual = (rng.normal(size=100_000) * 10.0 ** rng.uniform(-9, 5, 100_000)).astype(np.float32)
    given = np.concatenate([at_random[np.isfinite(at_random)], usual, np.float32([0, -0.0, 65519, 65520, 3.4e38])])
    narrow = lambda x: Lazy(visible=True, wide=FLOAT64).narrow(x, mx.zeros(1, getattr(mx, dtype))).astype(mx.float32)
    found = np.array(transform(narrow)(mx.array(given)))
    kind = {"float16": FLOAT16, "bfloat16": BFLOAT16}[dtype]
    near = np.abs(given) < 65520 if kind is FLOAT16 else np.isfinite(given)
    assert (np.abs(found) <= np.abs(given))[near].all()
    normal = near & (np.abs(given) >= kind.tiny)
    assert (np.abs(found) >= np.abs(given) * (1.0 - 4.0 * kind.roundoff))[normal].all()
    lowest = given[near & ~normal]
    assert (
        found[near & ~normal].tolist()
        == (np.trunc(lowest / kind.step) * kind.step if kind is FLOAT16 else lowest * 0).tolist()
    )
    assert np.array(transform(narrow)(mx.array([np.inf, -np.inf]))).tolist() == [np.inf, -np.inf]


@pytest.mark.parametrize("size", [2**16 - 1, 2**16, 2**16 + 1, 2**17, 3 * 2**16 + 5])
def test_powers_are_added_in_pieces(size):
    x = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    given = mx.array(x).reshape(-1, 5) if size % 5 == 0 else mx.array(x)
    for ord, expected in ((2, math.sqrt(np.sum(x.astype(float) ** 2))), (1, np.sum(np.abs(x.astype(float))))):
        norm = mx.compile(lambda x, ord=ord: gradclip.global_norm(x, ord=ord))(given)
        assert norm.item() == pytest.approx(expected, rel=2.0**-23)


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64"])
def test_integers_as_thresholds_are_not_rounded_up(dtype):
    given = mx.array([0, 5, 2**24 + 1, 2**24 + 3], dtype=getattr(mx, dtype))
    assert Lazy(visible=True, wide=FLOAT32).scalar(given, ()).tolist() == [0, 5, 2**24, 2**24 + 2]


def test_a_gpu_leaves_float64_to_the_cpu(monkeypatch):
    from gradclip._src.backends.mlx import framework

    monkeypatch.setattr(framework, "on_gpu", lambda: True)
    assert framework.wide_of([mx.array([1.0])]) is FLOAT32
    assert framework.wide_of([mx.array([1.0], dtype=mx.float64)]) is FLOAT64
    backend = framework.MLX.backend([mx.array([1.0])], ())
    assert (backend.wide, backend.visible) == (FLOAT32, True)


def test_the_bound_holds_where_mlx_reads_subnormal_numbers_as_zero(tmp_path):
    # Its thread has the mode of the one that starts it.
    code = """
        import numpy, torch
        torch.set_flush_denormal(True)
        import mlx.core as mx, gradclip
        mx.eval(mx.ones(2) * 2)
        torch.set_flush_denormal(False)
        x = mx.array(numpy.full(4, 1e-39, numpy.float32))
        assert float(numpy.array(x * mx.array(1.0))[0]) == 0.0
        (clipped,), _ = mx.vjp(lambda x: gradclip.clip_by_global_norm(x, 1.9e-39)[0], [x], [x])
        (kept,), _ = mx.vjp(lambda x: gradclip.clip_by_global_norm(x, 1e-30)[0], [x], [x])
        print(numpy.array(clipped).tolist(), numpy.array(kept).tolist() == numpy.array(x).tolist())
        """
    assert fresh_process.run(code, tmp_path) == "[0.0, 0.0, 0.0, 0.0] True"


@pytest.mark.parametrize("name", ["max", "min"])
@pytest.mark.parametrize("size", [2, 33, 1025])
def test_mlx_finds_a_nan_anywhere(name, size):
    # On a GPU, `largest_of` and `smallest_of` look for it themselves.
    for at in (0, size // 2, size - 1):
        for dtype in (mx.float32, mx.float64):
            x = np.ones(size)
            x[at] = np.nan
            assert math.isnan(getattr(mx, name)(mx.array(x, dtype=dtype)).item())
            assert math.isnan(
                Lazy(visible=True, wide=FLOAT32)
                .norms(_arrays(x), Order(-math.inf if name == "min" else math.inf))
                .value.item()
            )


def _arrays(x):
    from gradclip._src.core.arrays import Arrays

    return Arrays([mx.array(x, dtype=mx.float32)])


def test_mlx_rounds_as_the_bound_needs():
    # Quotients, products, sums and conversions to nearest, eager and compiled, below the normal range too.
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=4096) * 10.0 ** rng.uniform(-30, 8, size=4096) for _ in range(2))
    for dtype in (np.float32, np.float64):
        x, y = a.astype(dtype), b.astype(dtype)
        given = [mx.array(v, dtype=getattr(mx, v.dtype.name)) for v in (x, y)]
        for function in (lambda p, q: p / q, lambda p, q: p * q, lambda p, q: p + q):
            with np.errstate(all="ignore"):
                expected = function(x, y)
            assert np.array(function(*given)).tolist() == expected.tolist()
            assert np.array(mx.compile(function)(*given)).tolist() == expected.tolist()
    assert np.array(mx.array(a, dtype=mx.float64).astype(mx.float32)).tolist() == a.astype(np.float32).tolist()
