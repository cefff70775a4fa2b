import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import torch
from jax_privacy.clipping import clip_pytree
from opacus.optimizers import DPOptimizer

import gradclip
from frameworks import ALL, by_name
from gradclip import Sensitivity, check_sensitivity, clipped_sum_sensitivity
from gradclip._src.backends.host.exact import squared_distance
from gradclip._src.private.sums.sensitivity import root_up

RELATIONS = ("add_or_remove_one", "replace_one", "zero_out")
GIVEN = np.random.default_rng(0).normal(size=(12, 5))


def clipped_sum(max_norm, **options):
    return lambda grads: gradclip.per_example_clip(grads, max_norm, **options)[0]


def naive(max_norm, xp=np):
    """Return the sum that a reader would write: g * min(1, C / norm), all in the dtype of the gradients."""

    def function(grads):
        norms = xp.sqrt((grads * grads).sum(1))
        factors = max_norm / norms
        factors = xp.where(factors > 1, xp.ones_like(factors), factors)
        return (grads * factors[:, None]).sum(0)

    return function


# What holds


@pytest.mark.parametrize("framework", ALL, ids=by_name)
@pytest.mark.parametrize("relation", RELATIONS)
def test_ours_holds_on_every_framework_and_dtype(framework, relation):
    wide = {"float64": "float64", "complex128": "float64"}
    function = clipped_sum(0.7)
    with framework.mode():
        for dtype in framework.dtypes[:: 1 if relation == "add_or_remove_one" else 3]:
            promised = clipped_sum_sensitivity(
                0.7,
                relation,
                batch_size=12,
                layout=gradclip.SumLayout(elements=6),
                sum_dtype=wide.get(dtype, "float32"),
            )
            tree = {"w": framework.array(GIVEN, dtype), "b": framework.array(GIVEN[:, 0], dtype)}
            traced = framework.compiled(function)
            report = check_sensitivity(traced, tree, sensitivity=promised, trials=1)
            assert report, report
            assert report.worst.distance > 0.69 * (2 if relation == "replace_one" else 1)


@pytest.mark.parametrize("framework", [f for f in ALL if f.name in ("numpy", "torch-device", "jax-jit")], ids=by_name)
@pytest.mark.parametrize(
    "options",
    [
        {"per_layer": True},
        {"per_layer": True, "uniform": False},
        {"nonfinite": "zero"},
        {"rule": "normalize"},
        {"rule": "automatic"},
        {"sum_dtype": "float32"},
        {"mask": np.arange(12) != 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("max_norm", [1e-30, 30.0])
def test_ours_holds_for_every_option(framework, options, max_norm):
    promised = clipped_sum_sensitivity(max_norm, "zero_out", batch_size=12, layout=gradclip.SumLayout(elements=6))
    tree = [framework.array(GIVEN), framework.array(GIVEN[:, :1])]
    function = clipped_sum(max_norm, **options)
    with framework.mode():
        report = check_sensitivity(framework.compiled(function), tree, sensitivity=promised, trials=1)
    assert report, report
    assert report.worst.distance > 0.5 * max_norm


def test_ours_holds_for_many_correlated_examples_in_bfloat16():
    given = np.ones((4096, 4), ml_dtypes.bfloat16)
    report = check_sensitivity(
        clipped_sum(1.0), given, sensitivity=clipped_sum_sensitivity(1.0, batch_size=4096), trials=1
    )
    assert report, report
    assert report.worst.distance > 0.999


def test_one_example_changes_the_rounding_of_the_sum_of_the_others():
    # A row of zeros more, in another order of additions, is what the rounding term is for.
    promised = clipped_sum_sensitivity(1.0, batch_size=12, sum_dtype="float64", layout=gradclip.SumLayout(elements=5))
    report = check_sensitivity(clipped_sum(1.0), GIVEN, sensitivity=promised)
    found = {case.name: case.distance for case in report.cases if "NaN" in case.name}
    assert all(0 < distance <= promised.rounding for distance in found.values()), found


@pytest.mark.parametrize("grid", [2**30, 2**50])
@pytest.mark.parametrize("framework", ALL, ids=by_name)
def test_on_a_grid_one_example_changes_no_other_and_nothing_rounds(framework, grid):
    promised = clipped_sum_sensitivity(float(grid), grid=grid)
    assert promised.total == grid
    function = clipped_sum(float(grid), grid=grid)
    with framework.mode(), jax.enable_x64(True):
        function = framework.compiled(function)
        for dtype in (d for d in framework.dtypes if "complex" not in d):
            report = check_sensitivity(function, framework.array(GIVEN, dtype), sensitivity=promised, trials=1)
            assert report, report
            assert dtype == "float16" or report.worst.distance > 0.999999 * grid
            nothing = [
                case for case in report.cases if case.name.startswith(("zeros", "one NaN", "nothing", "one inf"))
            ]
            assert [case.distance for case in nothing] == [0.0] * 4


# What does not


def cases_of(function, examples, promised, **settings):
    """Return the report's failures by the kind of example."""
    report = check_sensitivity(function, examples, sensitivity=promised, **settings)
    return {case.name.split(" among ")[0]: case for case in report.failures}


@pytest.mark.parametrize("xp", [np, jnp, torch], ids=lambda xp: xp.__name__)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_one_nan_spoils_the_usual_formula(xp, dtype):
    given = {np: np.asarray, jnp: jnp.asarray, torch: torch.tensor}[xp](np.float32(GIVEN))
    promised = clipped_sum_sensitivity(1.0, batch_size=12)
    function = jax.jit(naive(1.0, xp)) if xp is jnp else naive(1.0, xp)
    failures = cases_of(function, given, promised, dtypes=[dtype], trials=1)
    for kind in ("one NaN", "nothing but NaN", "one infinity"):
        case = failures[f"{dtype}: {kind}"]
        assert (case.problem, case.distance) == ("NaN in the result", math.inf)


@pytest.mark.parametrize(
    ("dtype", "max_norm", "at_least"),
    [("float16", 1e-4, 1.2e-4), ("float32", 1e-26, 1e-24), ("bfloat16", 1e-26, 1e-24)],
)
def test_squares_that_underflow_escape_the_usual_formula(dtype, max_norm, at_least):
    given = torch.ones(3, 4)
    promised = clipped_sum_sensitivity(max_norm, batch_size=3)
    case = cases_of(naive(max_norm, torch), given, promised, dtypes=[dtype])[f"{dtype}: squares underflow"]
    assert case.problem or case.distance > at_least
    ours = check_sensitivity(clipped_sum(max_norm), given, sensitivity=promised, dtypes=[dtype])
    assert ours.holds, ours


def test_two_elements_of_1e_4_exceed_1e_4_by_41_percent_in_optax():
    grads = jnp.full((1, 2), 1e-4, jnp.float16)
    theirs = optax.per_example_global_norm_clip([grads], 1e-4)[0][0]
    ours = clipped_sum(1e-4)(grads)
    lengths = [root_up(squared_distance([np.float64(x)], [np.zeros(2)])) for x in (theirs, ours)]
    assert lengths[0] > 1.41e-4
    assert 0.999e-4 < lengths[1] <= 1e-4 * (1 + 2.0**-24)


def test_a_sum_in_bfloat16_moves_by_several_thresholds():
    given = jnp.ones((1024, 16), jnp.bfloat16)
    report = check_sensitivity(
        jax.jit(naive(1.0, jnp)), given, sensitivity=clipped_sum_sensitivity(1.0, batch_size=1024), trials=1
    )
    distances = {case.name: case.distance for case in report.failures if not case.problem}
    crowds = ("among examples like it", "among opposite examples")
    assert any(distance > 3 for name, distance in distances.items() if name.endswith(crowds))


def test_a_sum_that_overflows_float16_is_named():
    failures = cases_of(
        naive(100.0), np.ones((1024, 2), np.float16), Sensitivity(100.0, "example", relation="zero_out"), trials=1
    )
    assert failures["far above the threshold"].problem == "infinity in the result"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_optax_fails_on_nan_in_every_dtype(dtype):
    sum_of = jax.jit(lambda grads: optax.per_example_global_norm_clip([grads], 1.0)[0])
    given, promised = jnp.float32(GIVEN), clipped_sum_sensitivity(1.0, batch_size=12)
    failures = cases_of(sum_of, given, promised, dtypes=[dtype], trials=1)
    assert failures[f"{dtype}: one NaN"].problem == "NaN in the result"
    assert (len(failures) == 3) == (dtype == "float32")


@pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("dtype", "count", "at_least"), [("float16", 4096, 1.5), ("bfloat16", 1024, 3.0)])
def test_jax_privacy_sums_of_half_types_fail(dtype, count, at_least):
    @jax.jit
    def sum_of(grads):
        return jax.vmap(lambda g: clip_pytree(g, 1.0)[0])(grads).sum(0)

    given, promised = jnp.ones((count, 16)), clipped_sum_sensitivity(1.0, batch_size=count)
    report = check_sensitivity(sum_of, given, sensitivity=promised, dtypes=[dtype], trials=1)
    assert not report.holds
    assert report.worst.distance > at_least
    assert report.worst.problem is None


@pytest.mark.parametrize(
    ("dtype", "count", "at_least"), [("float16", 4096, 1.5), ("bfloat16", 1024, 3.0), ("float32", 1024, None)]
)
def test_opacus_fails_on_nan_and_in_half_types(dtype, count, at_least):
    def sum_of(grads):
        parameter = torch.nn.Parameter(torch.zeros(grads.shape[1:], dtype=grads.dtype))
        parameter.grad_sample = grads
        plain = torch.optim.SGD([parameter], lr=1.0)
        optimizer = DPOptimizer(plain, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=1)
        optimizer.clip_and_accumulate()
        return parameter.summed_grad

    given, promised = torch.ones(count, 16), clipped_sum_sensitivity(1.0, batch_size=count)
    failures = cases_of(sum_of, given, promised, dtypes=[dtype], trials=1)
    assert failures[f"{dtype}: one NaN"].problem == "NaN in the result"
    distances = [case.distance for case in failures.values() if not case.problem]
    assert not distances if at_least is None else max(distances) > at_least


def test_a_sum_whose_noise_is_for_a_mean():
    mean = clipped_sum_sensitivity(1.0, batch_size=12, normalize_by=12.0)
    report = check_sensitivity(clipped_sum(1.0), GIVEN, sensitivity=mean.bound)
    assert report.worst.distance == pytest.approx(12 * mean.bound, rel=1e-9)
    assert not report.holds


def test_a_mean_over_the_examples_there_are_is_no_mean_over_a_constant():
    # (S + x) / 12 - S / 11 with x = -S / 11: the number of examples is private, too.
    mean = lambda grads: clipped_sum(1.0)(grads) / len(grads)
    report = check_sensitivity(mean, GIVEN, sensitivity=clipped_sum_sensitivity(1.0, batch_size=12, normalize_by=12.0))
    assert not report.holds
    assert report.worst.name.endswith("among opposite examples")
    assert report.worst.distance == pytest.approx(2 / 12, rel=1e-6)


def test_noise_for_a_sum_added_to_a_mean_is_called_too_large():
    report = check_sensitivity(lambda grads: clipped_sum(1.0)(grads) / 12, GIVEN, sensitivity=1.0)
    assert report.holds
    assert "far below the promise. Is the promise for a sum, and the function a mean?" in str(report)
    assert "far below" not in str(check_sensitivity(clipped_sum(1.0), GIVEN, sensitivity=1.0 + 1e-9))


def test_the_same_seed_gives_the_same_report():
    reports = [check_sensitivity(clipped_sum(1.0), GIVEN, sensitivity=1.1, seed=seed, trials=1) for seed in (0, 0, 1)]
    assert reports[0] == reports[1]
    assert reports[0] != reports[2]


def test_an_arithmetic_error_is_a_failure_that_is_named():
    failures = cases_of(clipped_sum(1.0, nonfinite="raise"), np.float32(GIVEN), 1.1, trials=1)
    assert {case.problem for case in failures.values()} == {"raised FloatingPointError"}
    assert set(failures) == {"one NaN", "nothing but NaN", "one infinity"}


def test_an_error_of_the_function_itself_is_not_hidden():
    with pytest.raises(KeyError):
        check_sensitivity(lambda grads: grads["w"], {"v": GIVEN}, sensitivity=1.0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((np.ones((1, 3)), 1.0), ValueError, "two examples or more"),
        (({"w": np.ones((2, 3)), "b": np.ones(3)}, 1.0), ValueError, "batch on axis 0"),
        ((np.ones((2, 3), int), 1.0), TypeError, "int64, which cannot be clipped"),
        ((np.ones((2, 3)), -1.0), ValueError, "bound must be a distance"),
        ((np.ones((2, 3)), clipped_sum_sensitivity(1.0)), ValueError, "Pass batch_size="),
        ((np.ones((2, 3)), replace(clipped_sum_sensitivity(math.inf))), ValueError, "max_norm must be finite"),
    ],
)
def test_what_cannot_be_checked(arguments, error, message):
    with pytest.raises(error, match=message):
        check_sensitivity(clipped_sum(1.0), arguments[0], sensitivity=arguments[1])
