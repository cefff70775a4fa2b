"""A short run of every attack, always with the same cases; and that each attack finds what it is for."""

import dataclasses
from unittest import mock

import numpy as np
import pytest
import torch

import gradclip
import products
from attack import derivatives, layouts, places, run, settings
from gradclip._src.passed.leaves import as_floats

SEED = 12
CASES = {
    "trees": 200,
    "counters": 40,
    "derivatives": 24,
    "private": 80,
    "places": 12,
    "layouts": 150,
    "settings": 32,
    "sharing": 120,
    "folded": 60,
    "at_step": 80,
    "wrapped": 80,
    "idle": 12,
    "tapes": 4,
    "logs": 200,
    "eager": 12,
    "compiled": 24,
    "monitors": 40,
    "backward": 60,
    "adaptive": 40,
    "groups": 100,
}
PARTS = 4
"""Into how many tests an attack is divided. `make test` runs one of them, `make test-all` all."""


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_found(name, part):
    numbers = range(part, CASES[name], PARTS)
    found = {number: problem for number in numbers if (problem := run.case(name, SEED, number))}
    assert not found, "\n".join(f"number {number} of seed {SEED}: {problem}" for number, problem in found.items())


def test_nothing_is_found_over_processes():
    layouts.over_processes(np.random.default_rng(SEED), world=2, draws=8)


# What is wrong on purpose


def usual_clip(tree, max_norm, *, ord=2, nonfinite="propagate"):
    """Return the usual formula, in the dtypes of the leaves."""
    norm = sum((abs(x) ** 2).sum() for x in tree) ** 0.5
    share = max_norm / (norm + 1e-6)
    return [cast(x * share, x.dtype) if share < 1 else x for x in tree], norm


def cast(x, dtype):
    return x.to(dtype) if isinstance(x, torch.Tensor) else x.astype(dtype)


def without_derivative(tree, max_norm, **options):
    tree = {key: x.detach() for key, x in tree.items()}
    return REAL["clip_by_global_norm"](tree, max_norm, **options)


def twice(grads, max_norm, **options):
    """Return a sum that one example moves by more than twice the promise."""
    total, info = REAL["per_example_clip"](grads, max_norm, **options)
    return [x * 3 for x in total], info


def with_integers(tree, ord=2):
    """Return the norm of all numbers, integers too."""
    return REAL["global_norm"](as_floats(tree), ord)


def part_alone(tree, ord=2):
    """Return the norm of a part, measured as if the part held another element of its size."""
    known = REAL["partial_norm"](tree, ord)
    return known + known


def by_default_dtype(tree, ord=2):
    """Return the norm in the default dtype of PyTorch."""
    norm = REAL["global_norm"](tree, ord)
    return norm.to(torch.get_default_dtype()) if isinstance(norm, torch.Tensor) else norm


def memory_once(given, max_norm, ord=2, **options):
    """Count gradients that start at the same place in memory once."""
    grads = [getattr(one, "grad", one) for one in given]
    starts = [x.data_ptr() if isinstance(x, torch.Tensor) else x.ctypes.data for x in grads]
    each = dict(zip(starts, given, strict=True))
    return REAL["clip_grad_norm_"](list(each.values()), max_norm, ord, **options)


def by_one_norm(given, max_norm, ord=2, **options):
    """Clip groups, or parameters with names, by one norm and the largest of their thresholds."""
    if isinstance(max_norm, dict):
        limits, held = max_norm.values(), list(given.values())
    else:
        limits = [group.get("max_norm", max_norm) for group in given]
        held = [one for group in given for one in group["params"]]
    return REAL["clip_grad_norm_"](held, max((x for x in limits if x is not None), default=np.inf), ord, **options)


def anywhere(*arguments, **options):
    """Return a clipped sum that promises the same to examples that move."""
    clipped = REAL["clipped_grad"](*arguments, **options)
    promise = type(clipped).sensitivity
    broken = {"sensitivity": lambda self, *a, **k: dataclasses.replace(promise(self, *a, **k), keeps_places=False)}
    return type("Anywhere", (type(clipped),), broken)(
        **{field.name: getattr(clipped, field.name) for field in dataclasses.fields(clipped) if field.init}
    )


NAMES = ("clipped_grad", "clip_by_global_norm", "per_example_clip", "partial_norm", "global_norm", "clip_grad_norm_")
REAL = {name: getattr(gradclip, name) for name in NAMES}
BROKEN = [
    ("trees", "clip_by_global_norm", usual_clip),
    ("counters", "global_norm", with_integers),
    ("derivatives", "clip_by_global_norm", without_derivative),
    ("private", "per_example_clip", twice),
    ("places", "clipped_grad", anywhere),
    ("layouts", "partial_norm", part_alone),
    ("settings", "global_norm", by_default_dtype),
    ("sharing", "clip_grad_norm_", memory_once),
    ("groups", "clip_grad_norm_", by_one_norm),
]


def numbers_for(name, function):
    """Return the numbers of cases to try: where calls are of many kinds, those of the kind that is broken."""
    if name not in ("derivatives", "settings", "places"):
        return range(60)
    if name == "places":
        cases = ((number, places.draw(np.random.default_rng([SEED, number]))) for number in range(3000))
        return [n for n, case in cases if (case.framework, case.features, case.outputs) == ("torch", 257, 10)]
    draw = {"derivatives": derivatives.draw, "settings": settings.draw}[name]
    drawn = ((number, draw(np.random.default_rng([SEED, number]))) for number in range(3000))
    if name == "derivatives":
        return [number for number, case in drawn if (case.function, case.mode) == (function, "torch autograd")]
    kinds = ("torch", function, "torch default float16")
    return [number for number, case in drawn if (case.framework.name, case.call, case.setting) == kinds]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "function", "broken"), BROKEN)
def test_what_is_broken_is_found(name, function, broken):
    with mock.patch.object(gradclip, function, broken):
        found = (run.case(name, SEED, number) or "" for number in numbers_for(name, function))
        seen = any(problem.startswith("AssertionError") for problem in found)
        assert seen or (broken is anywhere and products.computes_all_places_alike())


def test_a_finding_is_printed_with_the_command_that_repeats_it(capsys):
    with mock.patch.object(run, "attacks", return_value={"trees": lambda rng: 1 / 0}):
        assert run.main(["--minutes", "0.0001", "--seed", "7"])
        assert run.main(["--only", "trees", "--seed", "7", "--number", "3"])
    printed = capsys.readouterr().out
    assert "FOUND by trees, seed 7, number 0: ZeroDivisionError" in printed
    assert "again: python tests/attack/run.py --only trees --seed 7 --number 0" in printed


def test_without_findings_all_is_well(capsys):
    with mock.patch.object(run, "attacks", return_value={"trees": lambda rng: None}):
        assert not run.main(["--minutes", "0.0001", "--seed", "7"])
    assert "trees 0 of" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: mock.patch("gradclip._src.step.handle.StepClipping._begin", return_value=None),
        lambda: mock.patch(
            "gradclip._src.step.at_step.clip_grad_norm_", lambda groups, *_, **__: gradclip.grad_norm(groups)
        ),
        lambda: mock.patch("gradclip._src.step.at_step.ClippingBeforeStep._skipped", return_value=[]),
        lambda: mock.patch("gradclip._src.step.within.threshold_of_scaled", lambda backend, max_norm, given: max_norm),
    ],
    ids=["it never clips", "it only measures", "it steps with zeros", "it clips scaled gradients"],
)
def test_a_wrong_step_is_found(wrong):
    with wrong():
        assert any(run.case("at_step", SEED, number) for number in range(CASES["at_step"]))
