"""The report of the self-test: what counts, and what it prints."""

from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from gradclip import Sensitivity, SensitivityReport, check_sensitivity, clipped_sum_sensitivity
from gradclip._src.private.audit.self_test import SensitivityCase

GIVEN = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)
PROMISE = Sensitivity(2.0, "example", relation="add_or_remove_one", keeps_places=True)


def usual(grads):
    norms = np.sqrt((grads * grads).sum(1))
    return (grads * np.minimum(1, 1 / norms)[:, None]).sum(0)


def test_the_report_is_a_table():
    report = check_sensitivity(usual, GIVEN, sensitivity=clipped_sum_sensitivity(1.0, batch_size=12))
    lines = str(report).splitlines()
    assert lines[0].startswith("promised: sum over examples, add or remove one example: at most 1.0 (+ ")
    assert lines[1].split() == ["example", "among", "other", "examples", "distance", "of", "the", "promise"]
    assert len(lines) == 3 + len(report.cases)
    assert lines[-1].startswith(f"BROKEN in {len(report.failures)} of 13 cases, worst for one NaN among ")
    assert sum(line.endswith(" BROKEN") for line in lines) == len(report.failures)
    with pytest.raises(FrozenInstanceError):
        report.cases = ()


def report_of(*distances_where_places_move, kept=1.5):
    moved = [SensitivityCase(f"moved {x}", x, promised=False) for x in distances_where_places_move]
    return SensitivityReport(PROMISE, (SensitivityCase("kept", kept), *moved))


def test_what_is_not_promised_is_shown_and_does_not_count():
    report = report_of(1.0, 7.0)
    assert (report.holds, report.worst.name, report.failures) == (True, "kept", ())
    lines = str(report).splitlines()
    assert lines[3].split() == ["moved", "1.0", "1", "50.0%"]
    assert lines[4].split() == ["moved", "7.0", "7", "3.5", "times:", "not", "promised"]
    assert lines[-1] == (
        "holds in all 1 cases; the largest distance is 1.5. Only if examples keep their places: where they move, the "
        "sum moves further"
    )
    assert str(report_of(1.0)).endswith("the largest distance is 1.5")


def test_what_is_promised_counts():
    report = report_of(7.0, kept=2.5)
    assert (report.holds, len(report.failures)) == (False, 1)
    assert str(report).endswith("BROKEN in 1 of 1 cases, worst for kept")
    anywhere = replace(report, cases=tuple(replace(case, promised=True) for case in report.cases))
    assert anywhere.worst.name == "moved 7.0"
