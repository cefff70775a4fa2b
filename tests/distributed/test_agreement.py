"""Digests by which processes notice that they do not ask for the same, however many there are."""

import math
import random

import numpy as np
import pytest
import torch

from gradclip._src.distributed.agreement import asked, differences, marks


def seen(subjects, order, *, largest):
    """Return for each process, of which each has a subject, whether it finds that all have the same."""
    sent = np.array([marks(subject, len(subjects), largest=largest) for subject in subjects])
    found = sent.max(axis=0) if largest else np.zeros(2)
    for index in order if not largest else ():
        found = found + sent[index]
    return {bool((found == mark * (1 if largest else len(subjects))).all()) for mark in sent}


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("count", [2, 3, 7, 64, 1023, 1024, 10_000])
def test_all_or_none_see_a_difference(count, largest):
    rng = random.Random(count)
    order = rng.sample(range(count), count)
    assert seen([1.0] * count, order, largest=largest) == {True}
    for differing in {1, count // 2, count - 1}:
        subjects = [1.0] * (count - differing) + [math.nextafter(1.0, 2.0)] * differing
        assert seen(subjects, order, largest=largest) == {False}
        assert seen([1.0] * (count - differing) + list(range(differing)), order, largest=largest) == {False}


@pytest.mark.parametrize("count", range(2, 9))
def test_sums_and_largest_do_not_go_together(count):
    """A reduction in which some take the sum, and others the largest, of two numbers at a time."""
    rng = random.Random(count)
    for _ in range(300):
        kinds = [True, False, *(rng.random() < 0.5 for _ in range(count - 2))]
        rng.shuffle(kinds)
        sent = [marks("largest" if kind else "sum", count, largest=kind) for kind in kinds]
        found = list(sent[0])
        for mark, kind in zip(sent[1:], kinds[1:], strict=True):
            for i in range(2):
                merge = max if rng.random() < 0.5 else (max, sum)[not kind]
                found[i] = merge((found[i], mark[i]))
        for mark, kind in zip(sent, kinds, strict=True):
            assert found != [number * (1 if kind else count) for number in mark]


def test_thresholds_as_text():
    texts = {dict(asked(2.0, "drop", x))["max_norm"] for x in (1, 1.0, np.float32(1), torch.tensor(1.0))}
    assert texts == {"1.0"}
    assert asked(math.inf, "zero", None) == (
        ("max_norm", "not given (grad_norm)"),
        ("ord", "inf"),
        ("nonfinite", "'zero'"),
        ("skip_above", "inf"),
        ("the scale of GradScaler", "not given"),
    )
    assert dict(asked(2.0, "drop", "much"))["max_norm"] == "'much'"
    assert dict(asked(2.0, "drop", torch.empty((), device="meta")))["max_norm"] == "on meta"


def test_what_differs_in_words():
    ranks = [(rank, asked(2.0, "drop", 1.0 + (rank > 20)), "") for rank in range(40)]
    assert differences(ranks) == (
        "max_norm is 1.0 on ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, and 11 more, "
        "2.0 on ranks 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, and 9 more"
    )
    two = [(0, asked(1.0, "drop", 1.0), ""), (1, asked(2.0, "raise", 1.0), "")]
    assert differences(two) == "ord is 1.0 on rank 0, 2.0 on rank 1; nonfinite is 'drop' on rank 0, 'raise' on rank 1"
    scales = [(rank, asked(2.0, "drop", 1.0, scale=torch.tensor(2.0 + rank)), "") for rank in range(2)]
    assert differences(scales).startswith(
        "the scale of GradScaler is 2.0 on rank 0, 3.0 on rank 1. Start with the same scale"
    )
    skips = [(rank, asked(2.0, "drop", 1.0, skip_above=4.0 + rank), "") for rank in range(2)]
    assert differences(skips) == "skip_above is 4.0 on rank 0, 5.0 on rank 1"
    same = [(rank, asked(2.0, "drop", 1.0), f"splits over {rank}") for rank in range(2)]
    assert differences(same).endswith("or their order, differ: rank 0 splits over 0; rank 1 splits over 1")
