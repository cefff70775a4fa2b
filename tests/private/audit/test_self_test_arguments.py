"""What `check_sensitivity` says of settings, promises and results that are none."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import gradclip
from gradclip import Sensitivity, check_sensitivity

EXAMPLES = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


def ours(grads):
    return gradclip.per_example_clip(grads, 1.0)[0]


@pytest.mark.parametrize("promised", [np.float32(1.01), np.float64(1.01), jnp.float32(1.01), torch.tensor(1.01)])
def test_promises_may_be_scalars_of_a_framework(promised):
    report = check_sensitivity(ours, EXAMPLES, sensitivity=promised, trials=np.int64(1), seed=np.int64(3))
    assert report.holds
    assert report.promised == float(promised)


@pytest.mark.parametrize(
    "dtypes",
    ["float16", ["float16"], [np.float16], [np.dtype("float16")], np.float16, torch.float16, [torch.float16]],
    ids=str,
)
def test_dtypes_in_every_spelling(dtypes):
    report = check_sensitivity(ours, EXAMPLES, sensitivity=1.01, dtypes=dtypes, trials=1)
    assert {case.name[:9] for case in report.cases} == {"float16: "}


def test_bfloat16_in_every_spelling():
    reports = [
        check_sensitivity(ours, EXAMPLES, sensitivity=1.01, dtypes=[dtype], trials=1)
        for dtype in ("bfloat16", ml_dtypes.bfloat16, jnp.bfloat16, torch.bfloat16)
    ]
    assert all(report == reports[0] for report in reports)


@pytest.mark.parametrize("dtypes", ["int8", ["int8"], ["float8_e4m3"], ["f"], 5, ["float16", "x"], [np.int32]], ids=str)
def test_dtypes_of_no_gradients(dtypes):
    with pytest.raises(ValueError, match=r"dtypes must be among float16, bfloat16, .*, got"):
        check_sensitivity(ours, EXAMPLES, sensitivity=1.01, dtypes=dtypes)


def test_float64_that_jax_has_not():
    with pytest.raises(ValueError, match=r"JAX has no float64 in 32-bit mode\. Enable jax_enable_x64"):
        check_sensitivity(ours, jnp.asarray(EXAMPLES), sensitivity=1.01, dtypes=["float64"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trials": 0}, "trials must be a whole number, 1 or more, got 0"),
        ({"trials": -1}, "trials must be a whole number, 1 or more, got -1"),
        ({"trials": 1.5}, "trials must be a whole number"),
        ({"trials": None}, "trials must be a whole number"),
        ({"trials": 10**5000}, "trials must be a whole number, 1 or more, at most 2"),
        ({"seed": -1}, "seed must be a whole number, 0 or more, got -1"),
        ({"seed": "a"}, "seed must be a whole number"),
        ({"seed": None}, "seed must be a whole number"),
        ({"sensitivity": 10**400}, "sensitivity must be a number within float64's range"),
        ({"sensitivity": float("nan")}, "bound must be a distance"),
        ({"sensitivity": float("inf")}, "sensitivity of this sum is infinite"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        check_sensitivity(ours, EXAMPLES, **({"sensitivity": 1.01} | settings))


@pytest.mark.parametrize("promised", [None, "1", True, 1j, [1.0], np.ones(2)], ids=str)
def test_promises_that_are_no_numbers(promised):
    with pytest.raises(TypeError, match="sensitivity must be a number, got"):
        check_sensitivity(ours, EXAMPLES, sensitivity=promised)


def test_a_function_that_is_none():
    with pytest.raises(TypeError, match="fun must be callable with a tree of gradients, got 3"):
        check_sensitivity(3, EXAMPLES, sensitivity=1.01)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda g: gradclip.per_example_clip(g, 1.0),
            r"norms float32\[4\] for 4 .*norms float32\[3\] for 3",
        ),
        (lambda g: g, r"an array float32\[4, 3\] for 4 examples, and an array float32\[3, 3\] for 3"),
        (lambda g: {len(g): ours(g)}, r"\[4\] float32\[3\] for 4 examples, and \[3\] float32\[3\] for 3"),
        (lambda g: [ours(g)] * len(g), "with the same structure"),
        (lambda g: ours(g) if len(g) == 4 else np.ones(3, int), r"float32\[3\] for 4 .* int64\[3\] for 3"),
        (lambda g: ours(g) if len(g) == 4 else [ours(g)], "with the same structure"),
        (lambda g: torch.ones(len(g)), r"float32\[4\] for 4"),
        (lambda g: None, "fun returned no arrays"),
    ],
)
def test_results_of_another_structure(function, message):
    with pytest.raises(ValueError, match=message):
        check_sensitivity(function, EXAMPLES, sensitivity=1.01, trials=1)


@pytest.mark.parametrize(
    "function",
    [
        lambda g: "a",
        lambda g: np.array([None]),
        lambda g: ours(g) > 0,
        lambda g: np.longdouble(ours(g)),
        lambda g: torch.ones(3) > 0,
        lambda g: object(),
    ],
)
def test_results_that_are_no_sums(function):
    with pytest.raises(TypeError, match=r"fun returned .* of dtype .*. Return sums in one of float16"):
        check_sensitivity(function, EXAMPLES, sensitivity=1.01, trials=1)


def test_huge_promises():
    huge = Sensitivity(1e300, "example", relation="zero_out", denominator=1e300)
    assert check_sensitivity(ours, EXAMPLES, sensitivity=huge, trials=1).holds
    assert check_sensitivity(ours, EXAMPLES, sensitivity=1.7e308, trials=1).holds


def test_examples_to_check_are_arrays_of_examples():
    def summed(rows):
        return rows.sum(axis=0)

    with pytest.raises(ValueError, match="every leaf must carry the batch on axis 0"):
        gradclip.check_sensitivity(summed, [1.0, 2.0], sensitivity=1.0)
    with pytest.raises(TypeError, match="examples has dtype int64, which cannot be clipped"):
        gradclip.check_sensitivity(summed, np.ones((4, 3), int), sensitivity=1.0)
