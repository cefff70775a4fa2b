import math

import numpy as np
import pytest

import gradclip
from frameworks import PAIRS, WITH_FLOAT64, by_name
from gradclip._src.core.formats import FLOAT32, FLOAT64
from gradclip._src.core.norms import Order, relative_error

# Beyond 2**126 times the threshold a float32 multiplier has fewer digits.
TIGHT = 1e-5
SIZES = (1, 15, 16, 17, 65535, 65537)


def norm(framework, tree, ord=2):
    return framework.to_numpy(framework.call(lambda t: gradclip.global_norm(t, ord), tree))


@pytest.mark.parametrize(
    ("ord", "expected"),
    [
        (2, 13.0),
        (None, 13.0),
        (2.0, 13.0),
        (1, 19.0),
        (3, 1819 ** (1 / 3)),
        ("inf", 12.0),
        (math.inf, 12.0),
        ("-inf", 3.0),
    ],
)
def test_each_order(framework, ord, expected):
    tree = {"w": framework.array([3.0, -4.0]), "b": [framework.array([[12.0]])]}
    assert norm(framework, tree, ord) == pytest.approx(expected, rel=1e-7)


def test_reference_example(framework):
    tree = framework.array([[-2.0, 3.0], [1.0, -4.0]])
    assert norm(framework, tree) == pytest.approx(math.sqrt(30), rel=1e-7)
    assert norm(framework, tree, 1) == 10.0
    assert norm(framework, tree, "inf") == 4.0


@pytest.mark.parametrize("ord", [0.5, 0, -1, math.nan, "2", "fro", True, [2], object()])
def test_anything_else_is_no_order(ord):
    with pytest.raises(ValueError, match="ord must be a number >= 1"):
        gradclip.global_norm(np.ones(2), ord)


@pytest.mark.parametrize(
    ("value", "dtype", "count", "expected"),
    [
        (1e30, "float32", 4, 2e30),
        (1e-30, "float32", 4, 2e-30),
        (1e-45, "float32", 4, 2.802596928649634e-45),
        (300.0, "float16", 1_000_000, 300_000.0),
        (1e-5, "float16", 4, 2 * 1.0013580322265625e-05),
        (3e38, "bfloat16", 1, 226 * 2.0**120),
    ],
)
def test_no_overflow_and_no_underflow(framework, value, dtype, count, expected):
    got = norm(framework, framework.array(np.full(count, value), dtype))
    assert float(got) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("framework", WITH_FLOAT64, ids=by_name)
@pytest.mark.parametrize("value", [1e308, 1e300, 1e200, 1e-160, 1e-200, 1e-300])
@pytest.mark.parametrize("ord", [1, 1.5, 2, 3, 20, 1000])
def test_float64_keeps_its_range(framework, value, ord):
    got = float(norm(framework, framework.array([value / 4] * 4 + [0.0], "float64"), ord))
    expected = value / 4 * 4 ** (1 / ord)
    assert got == pytest.approx(expected, rel=1e-14)


def test_small_leaves_do_not_saturate(framework):
    leaves = [framework.array(np.ones(1), "bfloat16") for _ in range(300)]
    assert float(norm(framework, leaves)) == pytest.approx(math.sqrt(300), rel=1e-6)


def test_norm_beyond_float32_is_inf_but_clips_right(framework):
    tree = framework.array(np.full(100, 3e38))
    clipped, before = framework.call(lambda t: gradclip.clip_by_global_norm(t, 1.0), tree)
    assert framework.to_numpy(before) == np.inf
    np.testing.assert_allclose(
        framework.to_numpy(clipped), np.full(100, 0.1), rtol=TIGHT if framework.name == "torch-device" else 2e-7
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("framework", "dtype"), PAIRS, ids=by_name)
def test_error_is_within_what_is_stated(framework, dtype, size):
    x = np.random.default_rng(size).normal(size=size)
    array = framework.array(x + 1j * x[::-1] if "complex" in dtype else x, dtype)
    parts = np.stack([framework.to_numpy(array).astype(complex).real, framework.to_numpy(array).astype(complex).imag])
    exact = math.sqrt(math.fsum((parts**2).ravel()))
    precise = dtype in ("float64", "complex128")
    assert float(norm(framework, array)) == pytest.approx(exact, rel=1e-14 if precise else 1e-7)


@pytest.mark.parametrize(("framework", "dtype"), PAIRS, ids=by_name)
def test_norm_dtype_is_float64_only_for_float64_leaves(framework, dtype):
    expected = "float64" if dtype in ("float64", "complex128") else "float32"
    assert str(norm(framework, framework.array([3.0, 4.0], dtype)).dtype) == expected


def test_norm_of_mixed_halves_and_floats_is_float32(framework):
    mixed = [framework.array([3.0], "float16"), framework.array([4.0], "float32")]
    assert str(norm(framework, mixed).dtype) == "float32"


def test_integers_count_nothing(framework):
    tree = [framework.array([3, 4], "int32"), framework.array([3.0, 4.0]), framework.array([7], "int8")]
    assert float(norm(framework, tree)) == 5.0


def test_empty_trees_leaves_and_none(framework):
    assert float(gradclip.global_norm({})) == 0.0
    assert float(norm(framework, {"a": framework.array(np.zeros((0, 3))), "b": None})) == 0.0
    tree = {"a": framework.array(np.zeros((0,))), "b": None, "c": framework.array(3.0)}
    for ord in (1, 2, "inf", "-inf"):
        assert float(norm(framework, tree, ord)) == 3.0


@pytest.mark.parametrize("ord", [1, 2, 3, "inf", "-inf"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_elements_show_in_the_norm(framework, ord, bad):
    assert not np.isfinite(norm(framework, framework.array([1.0, bad, 2.0]), ord))


def test_non_contiguous_arrays(framework):
    x = np.random.default_rng(0).normal(size=(70, 900)).astype(np.float32)
    expected = np.sqrt(np.sum(x[::2, ::3].astype(np.float64) ** 2))
    views = {"numpy": lambda a: a[::2, ::3], "torch": lambda a: a[::2, ::3].t()}
    view = views.get(framework.name, views["numpy"])(framework.array(x))
    assert float(norm(framework, view)) == pytest.approx(expected, rel=1e-7)


def test_layer_norms_keep_the_structure(framework):
    tree = {"w": framework.array([3.0, 4.0]), "b": [framework.array(-2.0), None]}
    got = framework.numbers(framework.call(gradclip.layer_norms, tree))
    assert got == {"w": 5.0, "b": [2.0, None]}


def test_error_bound_grows_with_what_is_added():
    two = Order(2.0)
    assert 2.0**-23 < relative_error(two, 2.0**-22, FLOAT64, exact=False) < 1.2e-7
    assert relative_error(two, 10 * 2.0**-53, FLOAT64, exact=False) == pytest.approx(21 * 2.0**-53, rel=1e-13)
    assert relative_error(Order(1.0), 10 * 2.0**-53, FLOAT64, exact=False) == 26 * 2.0**-53
    assert relative_error(two, 64 * 2.0**-24, FLOAT32, exact=False) < 3e-6
    assert relative_error(two, 2.0**-4, FLOAT64, exact=False) == pytest.approx(2.0**-5 + 2.0**-8, rel=1e-12)
    assert relative_error(Order(math.inf), 1.0, FLOAT64, exact=True) == 0.0
    assert relative_error(Order(0.5), 2.0**-53, FLOAT64, exact=False) > relative_error(
        two, 2.0**-53, FLOAT64, exact=False
    )
