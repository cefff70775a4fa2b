"""NumPy arrays in the other byte order: the same numbers, and results in the order of the input."""

from types import SimpleNamespace

import numpy as np
import pytest

from gradclip import (
    clip_by_global_norm,
    clip_by_layer_norm,
    clip_by_value,
    clip_grad_norm_,
    clip_grad_value_,
    global_norm,
    layer_norms,
    partial_norm,
    per_example_clip,
)
from gradclip._src.inplace.norm import clip_grads_with_norm_

SWAPPED = [np.dtype(code).newbyteorder("S") for code in ("f2", "f4", "f8", "c8", "c16")]
POLICIES = ("propagate", "zero", "drop")
THRESHOLDS = (0.0, 0.5, 5.0, 1e300)
LAYOUTS = {
    "dense": lambda x: x,
    "transposed": lambda x: x.T,
    "strided": lambda x: x[::2, 1:],
    "scalar": lambda x: x[2, 3, ...],
    "empty": lambda x: x[:0],
}


def drawn(dtype, layout, bad=None):
    """Return an array in each byte order."""
    rng = np.random.default_rng(1)
    numbers = rng.standard_normal((6, 7))
    numbers[2, 3] = 0.1 if bad is None else bad
    if dtype.kind == "c":
        numbers = numbers + 1j * rng.standard_normal((6, 7))
    native = numbers.astype(dtype.newbyteorder("="))
    return LAYOUTS[layout](native), LAYOUTS[layout](native.astype(dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", SWAPPED, ids=lambda dtype: dtype.name)
def test_results_keep_the_byte_order(dtype, layout):
    native, swapped = drawn(dtype, layout)
    assert global_norm(swapped) == pytest.approx(global_norm(native), rel=1e-7)
    assert global_norm(swapped).dtype == global_norm(native).dtype
    assert layer_norms([swapped])[0] == pytest.approx(layer_norms([native])[0], rel=1e-7)
    functions = [
        lambda x, c: clip_by_global_norm({"w": x}, c)[0]["w"],
        lambda x, c: clip_by_layer_norm([x], c)[0][0],
        lambda x, c: partial_norm(x).clip(x, c),
        *([] if dtype.kind == "c" else [clip_by_value]),
    ]
    for function in functions:
        for threshold in THRESHOLDS:
            before = swapped.copy()
            result = function(swapped, threshold)
            expected = function(native, threshold)
            assert result.dtype == dtype
            assert not np.shares_memory(result, swapped)
            assert swapped.tobytes() == before.tobytes()
            np.testing.assert_allclose(result, expected, rtol=2e-3 if dtype.itemsize == 2 else 1e-6)
            assert np.all(np.abs(result.astype(complex)) <= np.abs(swapped.astype(complex)))


@pytest.mark.parametrize("nonfinite", POLICIES)
@pytest.mark.parametrize("bad", [None, np.nan, -np.inf])
@pytest.mark.parametrize("dtype", SWAPPED, ids=lambda dtype: dtype.name)
def test_calls_in_place_write_where_the_gradient_lies(dtype, bad, nonfinite):
    for layout in LAYOUTS:
        for threshold in THRESHOLDS:
            native, swapped = drawn(dtype, layout, bad)
            held, ours = swapped.copy(), swapped.copy()
            holder = SimpleNamespace(grad=held)
            norm = clip_grad_norm_([holder], threshold, nonfinite=nonfinite)
            clip_grad_norm_({"w": ours}, threshold, nonfinite=nonfinite)
            expected, known = clip_by_global_norm(native, threshold, nonfinite=nonfinite)
            assert holder.grad is held
            assert (held.dtype, ours.dtype) == (dtype, dtype)
            assert held.tobytes() == ours.tobytes()
            np.testing.assert_allclose(norm, known, rtol=1e-7)
            np.testing.assert_allclose(held, expected, rtol=2e-3 if dtype.itemsize == 2 else 1e-6)


def test_raise_counts_what_is_not_finite():
    with pytest.raises(FloatingPointError, match="1 NaN, 1 infinite of 3 elements"):
        clip_grad_norm_({"w": np.array([np.nan, 1.0, np.inf], ">f4")}, 1.0, nonfinite="raise")


def test_the_exact_decision_knows_the_byte_order():
    for dtype in (">f2", ">f4", ">f8", ">c8"):
        tie = np.array([3, 4], dtype)
        assert clip_by_global_norm(tie, 5.0)[0].tobytes() == tie.tobytes()
        assert clip_by_global_norm(tie, np.nextafter(5.0, 0.0))[0].tobytes() != tie.tobytes()


def test_values_and_given_norms_in_place():
    for dtype in (">f2", ">f4", ">f8"):
        first, second = np.array([-3, 0.5, 4], dtype), np.array([3, 4], dtype)
        clip_grad_value_({"w": first}, 1.0)
        assert (first.dtype, first.tolist()) == (dtype, [-1.0, 0.5, 1.0])
        clip_grads_with_norm_(SimpleNamespace(grad=second), 2.5, 5.0)
        assert second.dtype == dtype
        assert second.tolist() == pytest.approx([1.5, 2.0], rel=2e-3)


@pytest.mark.parametrize("options", [{}, {"per_layer": True}, {"rule": "automatic"}, {"grid": 1000}])
def test_examples_in_the_other_byte_order(options):
    for dtype in SWAPPED:
        if dtype.kind == "c" and "grid" in options:
            continue
        native, swapped = drawn(dtype, "dense")
        summed, info = per_example_clip([swapped, swapped], 1.0, **options)
        expected, known = per_example_clip([native, native], 1.0, **options)
        for ours, theirs in zip(summed, expected, strict=True):
            assert ours.dtype == theirs.dtype
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(info.norms, known.norms, rtol=1e-6)


def test_integers_in_the_other_byte_order_stay_as_they_are():
    given = [np.array([3.0, 4.0]), np.array([3, 4], ">i4"), np.array([3, 4], ">u2")]
    clipped, norm = clip_by_global_norm(given, 1.0)
    assert clipped[1:] == given[1:]
    assert float(norm) == 5.0
