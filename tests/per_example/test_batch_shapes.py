"""One example must move a clipped sum by no more than is promised where it changes the shape of the batch, too.

The losses have a kink where their predictions are, so that the last bits of these decide the gradients.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip
from gradclip import check_sensitivity, clipped_sum_sensitivity

MAKERS = {"jax": jnp.asarray, "torch": torch.as_tensor}
GIVEN = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


def clipped(max_norm=1.0, **settings):
    return gradclip.clipped_grad(lambda w, x: (x * w).sum(), max_norm, **settings)


def kinks(report):
    return [case for case in report.cases if "kink" in case.name]


def test_without_padding_one_example_moves_many(make):
    promised = clipped_sum_sensitivity(1.0, batch_size=16)
    report = check_sensitivity(clipped(), make(GIVEN), promised, trials=1)
    assert not report.holds
    assert set(report.failures) <= set(kinks(report))
    assert report.worst.distance > 3
    assert report.worst.name.startswith("one of ")
    assert len(kinks(report)) == 4


@pytest.mark.parametrize(
    "settings",
    [
        {"pad_to": 16},
        {"pad_to": 17},
        {"microbatch_size": 8},
        {"microbatch_size": 1},
        {"pad_to": 40, "microbatch_size": 16},
    ],
    ids=str,
)
def test_batches_of_one_shape_keep_the_promise(make, settings):
    sum_of = clipped(0.5, **settings)
    report = check_sensitivity(sum_of, make(GIVEN[:, :1]), sum_of.sensitivity(batch_size=16), trials=1)
    assert report.holds, report
    assert min(case.distance for case in kinks(report)) > 0.499999
    assert len(kinks(report)) == 4


def test_places_in_a_program_of_an_odd_size_differ():
    """Why nothing is promised of microbatches of 3: each example moves on by one place."""
    promised = clipped_sum_sensitivity(1.0, batch_size=16)
    report = check_sensitivity(clipped(microbatch_size=3), torch.as_tensor(GIVEN), promised, trials=1)
    assert report.worst.distance > 10


@pytest.mark.parametrize("relation", ["replace_one", "zero_out"])
def test_batches_of_one_number_of_examples_keep_the_promise(make, relation):
    sum_of = clipped()
    report = check_sensitivity(sum_of, make(GIVEN), sum_of.sensitivity(relation, batch_size=16), trials=1)
    assert report.holds, report


def test_on_a_grid_likewise():
    """In steps of a grid the distances are the same; the promise has no rounding."""
    exact = gradclip.clipped_sum_sensitivity(0.25, grid=10**6)
    padded, varying = (clipped(0.25, grid=10**6, **settings) for settings in ({"pad_to": 16}, {}))
    assert padded.sensitivity().total == exact.total == 0.25
    report = check_sensitivity(padded, torch.as_tensor(GIVEN), exact, trials=1)
    assert report.holds, report
    assert report.worst.distance > 0.24
    assert check_sensitivity(varying, torch.as_tensor(GIVEN), exact, trials=1).worst.distance > 0.74


def test_a_tree_of_thresholds_and_a_mean():
    tree = {"a": torch.as_tensor(GIVEN), "b": torch.as_tensor(GIVEN[:, :1].astype(np.float64))}
    sum_of = clipped_tree({"a": 3.0, "b": 4.0}, pad_to=16, normalize_by=5.0, unit="group", return_norms=True)
    assert sum_of.sensitivity().bound == 1.0
    report = check_sensitivity(sum_of, tree, sum_of.sensitivity(), trials=1)
    assert report.holds, report
    assert not check_sensitivity(clipped_tree({"a": 3.0, "b": 4.0}), tree, sum_of.sensitivity(), trials=1).holds


def clipped_tree(max_norm, **settings):
    return gradclip.clipped_grad(lambda w, x: (x * w["a"]).sum(), max_norm, **settings)
