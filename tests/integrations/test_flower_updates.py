"""Updates of clients, judged with whole numbers: exact, and as a server computes them."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import gradclip
from gradclip.integrations._flower_updates import (
    adaptive_clip_inputs_inplace,
    clip_inputs_inplace,
    clipped_parameters,
    compute_adaptive_clip_model_update,
    compute_clip_model_update,
    get_norm,
)
from rational import at_most

DTYPES = ["float16", "float32", "float64"]
SHAPES = [(7, 3), (5,), ()]


def squares(arrays):
    return sum(x * x for array in arrays for x in np.asarray(array, object).ravel().tolist())


def exact(new, old):
    """Return differences as fractions."""
    return [
        np.array([Fraction(float(a)) - Fraction(float(b)) for a, b in zip(x.ravel(), o.ravel(), strict=True)], object)
        for x, o in zip(new, old, strict=True)
    ]


def computed(new, old):
    return [np.subtract(x, o) for x, o in zip(new, old, strict=True)]


def longer_than(new, old, threshold):
    """Return whether the exact update is longer than a threshold, and whether the one that is computed is."""
    return squares(exact(new, old)) > Fraction(threshold) ** 2, not at_most(computed(new, old), 2, threshold)


def as_flower_does(new, old, threshold):
    """Clip as `flwr.supercore.differential_privacy.compute_clip_model_update` does."""
    update = computed(new, old)
    factor = min(1, threshold / math.sqrt(sum(np.linalg.norm(x.ravel()).item() ** 2 for x in update)))
    return [o + (x * factor).astype(x.dtype) for x, o in zip(update, old, strict=True)]


def random_round(seed, dtype, scale=1.0):
    rng = np.random.default_rng(seed)
    old = [np.asarray(rng.normal(size=shape) * 10.0 ** rng.uniform(-3, 1)).astype(dtype) for shape in SHAPES]
    new = [(o + scale * rng.normal(size=o.shape)).astype(dtype) for o in old]
    return new, old


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 0.01, 1000.0])
def test_no_update_is_longer_than_the_threshold(dtype, scale):
    for seed in range(100):
        new, old = random_round(seed, dtype, scale)
        threshold = float(np.float32(0.5 * scale))
        made = clipped_parameters(new, old, threshold)
        assert made.clipped
        assert longer_than(made.parameters, old, threshold) == (False, False)
        assert [x.dtype for x in made.parameters] == [np.dtype(dtype)] * 3
        assert [x.shape for x in made.parameters] == SHAPES


def test_the_usual_way_breaks_the_threshold_that_this_keeps():
    broken = {"flower": 0, "ours": 0}
    for seed in range(300):
        new, old = random_round(seed, "float32")
        for name, sent in (("flower", as_flower_does(new, old, 1.0)), ("ours", clipped_parameters(new, old, 1.0)[0])):
            broken[name] += any(longer_than(sent, old, 1.0))
    assert broken["flower"] > 100
    assert broken["ours"] == 0


def test_adding_the_clipped_update_to_the_parameters_does_not_lengthen_it():
    """Rounded to nearest, old + clipped would break the bound that the clipped update keeps."""
    broken = 0
    for seed in range(300):
        new, old = random_round(seed, "float32")
        update, _ = gradclip.clip_by_global_norm(computed(new, old), 1.0)
        assert at_most(update, 2, 1.0)
        broken += any(longer_than([o + u for o, u in zip(old, update, strict=True)], old, 1.0))
    assert 5 < broken < 60


@pytest.mark.parametrize("dtype", DTYPES)
def test_clipped_updates_are_near_the_threshold(dtype):
    """Rounding toward the old parameters costs at most a unit in their last place in each element."""
    for seed in range(50):
        new, old = random_round(seed, dtype)
        made = clipped_parameters(new, old, 0.5)
        unit = np.finfo(dtype).eps * 40.0 * math.sqrt(27)
        lowest = max(0.0, 0.5 * (1 - (0.01 if dtype == "float16" else 1e-5)) - unit)
        assert math.sqrt(float(squares(exact(made.parameters, old)))) >= lowest


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_of_many_elements_are_the_floats_next_to_the_sum(dtype):
    """Each is the nearest float to old + clipped, or the next one toward old if the nearest lies beyond."""
    rng = np.random.default_rng(0)
    old = (rng.normal(size=(7, 13, 401)) * 10.0 ** rng.uniform(-3, 1, (7, 13, 401))).astype(dtype)
    new = (old + 0.1 * rng.normal(size=old.shape)).astype(dtype)
    update, _ = gradclip.clip_by_global_norm([np.subtract(new, old)], 3.0)
    found = clipped_parameters([new], [old], 3.0).parameters[0]
    for s, o, u in zip(found.ravel(), old.ravel(), update[0].ravel(), strict=True):
        nearest, exact_sum = o + u, Fraction(float(o)) + Fraction(float(u))
        beyond = (Fraction(float(nearest)) - exact_sum) * (1 if u > 0 else -1) > 0
        assert s == (np.nextafter(nearest, o) if beyond else nearest)


@pytest.mark.parametrize("dtype", DTYPES)
def test_thresholds_near_the_norm_are_decided_as_by_exact_differences(dtype):
    """The clipped ones have an exact norm above the threshold, or a difference that its dtype cannot hold."""
    decided = set()
    for seed in range(100):
        new, old = random_round(seed, dtype)
        norm = math.sqrt(float(squares(exact(new, old))))
        for share in (-(2.0**-8), -(2.0**-10), -(2.0**-40), 2.0**-40, 2.0**-10, 2.0**-8):
            made = clipped_parameters(new, old, norm * (1 + share))
            decided.add((share, made.clipped))
            assert longer_than(made.parameters, old, norm * (1 + share)) == (False, False)
    assert {share for share, clipped in decided if not clipped} <= {2.0**-40, 2.0**-10, 2.0**-8}
    assert (2.0**-8, True) not in decided


@pytest.mark.parametrize("dtype", DTYPES)
def test_short_updates_are_sent_to_the_bit(dtype):
    for seed in range(50):
        new, old = random_round(seed, dtype, 0.01)
        made = clipped_parameters(new, old, 5.0)
        assert (made.clipped, made.finite) == (False, True)
        assert all(x.tobytes() == y.tobytes() for x, y in zip(made.parameters, new, strict=True))


def test_an_update_is_kept_only_if_its_exact_difference_is_within_the_threshold():
    """1 + 2**-30 in float64, minus 0: the difference in float32 would be 1."""
    new, old = [np.array([1.0, 2.0**-30], np.float32)], [np.array([0.0, 0.0], np.float32)]
    assert clipped_parameters(new, old, 1.0).clipped
    assert not clipped_parameters([np.array([1.0, 0.0], np.float32)], old, 1.0).clipped
    # 1 - (-2**-26) is 1 in float32, and longer than 1.
    new, old = [np.array([1.0], np.float32)], [np.array([-(2.0**-26)], np.float32)]
    made = clipped_parameters(new, old, 1.0)
    assert made.clipped
    assert not any(longer_than(made.parameters, old, 1.0))
    assert math.isclose(made.parameters[0][0], 1.0, rel_tol=1e-5)


def test_zeros_stay_and_lists_may_be_empty():
    old = [np.zeros(3, np.float32), np.zeros((), np.float32)]
    for threshold in (0.0, 1.0, math.inf):
        assert clipped_parameters(old, old, threshold).clipped is False
    made = clipped_parameters([np.ones(3, np.float32), np.float32(1)], old, 0.0)
    assert [x.tolist() for x in made.parameters] == [[0.0, 0.0, 0.0], 0.0]
    assert clipped_parameters([], [], 1.0) == ([], False, True)
    assert get_norm([]) == 0.0


@pytest.mark.parametrize("threshold", [0.0, 1.0, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_becomes_zero(bad, threshold):
    old = [np.array([1.0, 2.0], np.float32), np.array(3.0, np.float32), np.array(5)]
    new = [np.array([1.5, bad], np.float32), np.array(4.0, np.float32), np.array(6)]
    made = clipped_parameters(new, old, threshold)
    assert (made.clipped, made.finite) == (False, False)
    assert [x.tolist() for x in made.parameters] == [[1.0, 2.0], 3.0, 5]
    update = [np.array([1.0, bad]), np.array(2.0), np.array(7)]
    assert adaptive_clip_inputs_inplace(update, threshold) is False
    assert [x.tolist() for x in update] == [[0.0, 0.0], 0.0, 7]


def test_an_update_beyond_its_dtype_becomes_zero():
    old, new = [np.array([-3e38], np.float32)], [np.array([3e38], np.float32)]
    assert clipped_parameters(new, old, 1.0).parameters[0].tolist() == old[0].tolist()
    assert not clipped_parameters([np.array([1e300])], [np.zeros(1, np.float32)], 1.0).finite


@pytest.mark.parametrize("size", [1e30, 1e-30, 1e-44])
def test_updates_of_all_magnitudes_are_clipped(size):
    old = [np.zeros(2, np.float32), np.zeros((), np.float32)]
    new = [np.array([3 * size, 4 * size], np.float32), np.array(12 * size, np.float32)]
    threshold = 6.5 * size
    made = clipped_parameters(new, old, threshold)
    assert made.clipped
    assert not any(longer_than(made.parameters, old, threshold))
    if size > 1e-40:
        np.testing.assert_allclose(made.parameters[0], new[0] / 2, rtol=1e-5)


def test_counters_and_masks_do_not_count_and_are_sent_as_they_are():
    old = [np.zeros(2, np.float32), np.array(10), np.array([True, False])]
    new = [np.array([3.0, 4.0], np.float32), np.array(1000), np.array([False, True])]
    made = clipped_parameters(new, old, 5.0)
    assert not made.clipped
    made = clipped_parameters(new, old, 2.5)
    assert made.parameters[1:] == new[1:]
    np.testing.assert_allclose(made.parameters[0], [1.5, 2.0], rtol=1e-6)


def test_0d_parameters_are_clipped_with_the_others():
    new, old = [np.array(3.0, np.float32), np.array([4.0], np.float32)], [np.float32(0), np.zeros(1, np.float32)]
    compute_clip_model_update(new, old, 1.0)
    np.testing.assert_allclose([float(new[0]), float(new[1][0])], [0.6, 0.8], rtol=1e-6)


def test_updates_in_place():
    update = [np.array([3.0, 0.0], np.float32), np.float32(4.0), np.array(9)]
    first = update[0]
    clip_inputs_inplace(update, 1.0)
    assert update[0] is first
    np.testing.assert_allclose([*update[0], update[1], update[2]], [0.6, 0.0, 0.8, 9], rtol=1e-6)
    assert at_most([update[0], np.asarray(update[1])], 2, 1.0)
    assert adaptive_clip_inputs_inplace(update, 1.0) is False
    assert adaptive_clip_inputs_inplace([np.array([3.0, 4.0])], 4.9) is True


def test_complex_parameters_keep_the_bound():
    rng = np.random.default_rng(0)
    for _ in range(50):
        parts = rng.normal(size=(2, 2, 9)).astype(np.float32)
        old, new = [parts[0, 0] + 1j * parts[0, 1]], [parts[1, 0] + 1j * parts[1, 1]]
        made = clipped_parameters(new, old, 1.0).parameters
        real = [made[0].real, made[0].imag], [old[0].real, old[0].imag]
        assert made[0].dtype == np.complex64
        assert longer_than(*real, 1.0) == (False, False)


def test_other_floating_dtypes_are_converted_to_those_that_were_sent():
    made = clipped_parameters([np.array([1.0 + 2.0**-40, 0.0])], [np.zeros(2, np.float32)], 1.0)
    assert made.parameters[0].dtype == np.float32
    assert made.parameters[0].tolist() == [1.0, 0.0]


@pytest.mark.after_error
@pytest.mark.parametrize(
    ("new", "old", "message"),
    [
        ([np.ones(2)], [np.ones(3)], r"array 0 has shape \(2,\), and \(3,\) was sent"),
        ([np.ones(2)], [], "there are 1 and 0 arrays"),
    ],
)
def test_other_shapes_are_an_error(new, old, message):
    with pytest.raises(ValueError, match=message):
        compute_adaptive_clip_model_update(new, old, 1.0)
    assert new[0].tolist() == [1.0, 1.0]


@pytest.mark.after_error
@pytest.mark.parametrize(
    ("dtype", "sent", "kind", "message"),
    [
        ("bfloat16", "bfloat16", TypeError, "array 0 has dtype bfloat16, which cannot be clipped. Convert it"),
        (object, "float32", TypeError, "array 0 has dtype object"),
        ("float32", object, TypeError, "array 0 has dtype object"),
        ("float32", "int64", ValueError, "array 0 was sent in int64 and comes back in float32"),
        ("complex64", "float32", ValueError, "array 0 was sent in float32 and comes back in complex64"),
        (
            "int64",
            "float32",
            ValueError,
            "sent in float32 and comes back in int64, which is not clipped. Convert it to",
        ),
        ("uint8", "float64", ValueError, "array 0 was sent in float64 and comes back in uint8"),
        ("bool", "float16", ValueError, "array 0 was sent in float16 and comes back in bool"),
        ("int32", "complex64", ValueError, "array 0 was sent in complex64 and comes back in int32"),
    ],
)
def test_arrays_that_would_be_sent_unclipped_are_an_error(dtype, sent, kind, message):
    dtype, sent = (ml_dtypes.bfloat16 if name == "bfloat16" else name for name in (dtype, sent))
    new, old = [np.array([300, 400]).astype(dtype)], [np.zeros(2).astype(sent)]
    for call in (clipped_parameters, compute_clip_model_update, compute_adaptive_clip_model_update):
        with pytest.raises(kind, match=message):
            call(new, old, 1.0)
    assert new[0].tolist() == np.array([300, 400]).astype(dtype).tolist()


@pytest.mark.after_error
@pytest.mark.parametrize("call", [clip_inputs_inplace, adaptive_clip_inputs_inplace, lambda x, _: get_norm(x)])
def test_updates_in_place_of_unknown_dtypes_are_an_error(call):
    update = [np.array([3.0, 4.0]), np.array([300.0], ml_dtypes.bfloat16)]
    with pytest.raises(TypeError, match="array 1 has dtype bfloat16"):
        call(update, 1.0)
    assert [x.tolist() for x in update] == [[3.0, 4.0], [300.0]]


@pytest.mark.after_error
def test_a_threshold_that_is_none_is_an_error():
    new = [np.array([3.0, 4.0])]
    for call in (lambda: compute_clip_model_update(new, [np.zeros(2)], -1.0), lambda: clip_inputs_inplace(new, -1.0)):
        with pytest.raises(ValueError, match="clipping_norm must not be negative"):
            call()
    assert new[0].tolist() == [3.0, 4.0]
