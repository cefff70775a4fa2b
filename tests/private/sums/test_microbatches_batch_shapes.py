"""One example must move a clipped sum by no more than is promised where it changes the shape of the batch, too.

The losses have a kink where their predictions are, so that the last bits of these decide the gradients.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch

import gradclip
import products
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
    promised = clipped_sum_sensitivity(1.0, batch_size=8)
    report = check_sensitivity(clipped(), make(GIVEN[:8]), sensitivity=promised, trials=1)
    assert not report.holds
    assert set(report.failures) <= set(kinks(report))
    assert report.worst.distance > 3
    assert report.worst.name.startswith("one of ")
    assert len(kinks(report)) == 8


@pytest.mark.parametrize(
    "settings",
    [
        {"pad_to": 17},
        {"microbatch_size": 3},
        {"pad_to": 40, "microbatch_size": 16},
    ],
    ids=str,
)
def test_batches_of_one_shape_keep_the_promise(make, settings):
    sum_of = clipped(0.5, **settings)
    report = check_sensitivity(sum_of, make(GIVEN[:5, :1]), sensitivity=sum_of.sensitivity(batch_size=5), trials=1)
    assert report.holds, report
    assert min(case.distance for case in kinks(report)) > 0.499999
    assert len(kinks(report)) == 8
    assert all(case.promised == ("masked" in case.name) for case in kinks(report))


@pytest.mark.parametrize("settings", [{"microbatch_size": 1}, {"method": "loop"}], ids=str)
@pytest.mark.parametrize("name", [*MAKERS, "tensorflow"])
def test_examples_computed_alone_may_move(name, settings):
    given = MAKERS.get(name, tf.constant)(GIVEN[:3])
    sum_of = gradclip.clipped_grad(lambda w, x: w * x[0, 0], 0.5, **settings)
    report = check_sensitivity(sum_of, given, sensitivity=sum_of.sensitivity(batch_size=3), trials=1)
    assert report.holds, report
    assert all(case.promised for case in report.cases)


def test_examples_that_move_are_not_promised():
    """In PyTorch's matrix products some places are computed in another order, on some processors."""
    sum_of = clipped(pad_to=16)
    anywhere = check_sensitivity(
        sum_of, torch.as_tensor(GIVEN), sensitivity=clipped_sum_sensitivity(1.0, batch_size=16), trials=1
    )
    assert all(" removed" in case.name and "10 predictions" in case.name for case in anywhere.failures)
    kept = check_sensitivity(sum_of, torch.as_tensor(GIVEN), sensitivity=sum_of.sensitivity(), trials=1)
    assert kept.holds
    if anywhere.holds:
        assert products.computes_all_places_alike()
    else:
        assert anywhere.worst.distance > 3
        assert "Only if examples keep their places" in str(kept)


@pytest.mark.parametrize("relation", ["replace_one", "zero_out"])
def test_batches_of_one_number_of_examples_keep_the_promise(make, relation):
    sum_of = clipped()
    report = check_sensitivity(
        sum_of, make(GIVEN[:8]), sensitivity=sum_of.sensitivity(relation, batch_size=8), trials=1
    )
    assert report.holds, report


def test_on_a_grid_likewise():
    """In steps of a grid the distances are the same; the promise has no rounding."""
    exact = gradclip.clipped_sum_sensitivity(0.25, grid=10**6)
    padded, varying = (clipped(0.25, grid=10**6, **settings) for settings in ({"pad_to": 4}, {}))
    assert padded.sensitivity().total == exact.total == 0.25
    given = torch.as_tensor(GIVEN[:4])
    report = check_sensitivity(padded, given, sensitivity=padded.sensitivity(), trials=1)
    assert report.holds, report
    assert report.worst.distance > 0.24
    assert check_sensitivity(varying, given, sensitivity=exact, trials=1).worst.distance > 0.74


def test_a_tree_of_thresholds_and_a_mean():
    tree = {"a": torch.as_tensor(GIVEN[:4]), "b": torch.as_tensor(GIVEN[:4, :1].astype(np.float64))}
    loss = lambda w, x: (x * w["a"]).sum()
    settings = {"pad_to": 4, "normalize_by": 5.0, "unit": "group", "return_norms": True}
    sum_of = gradclip.clipped_grad(loss, {"a": 3.0, "b": 4.0}, **settings)
    assert sum_of.sensitivity().bound == 1.0
    report = check_sensitivity(sum_of, tree, sensitivity=sum_of.sensitivity(), trials=1)
    assert report.holds, report
    assert report.worst.distance > 0.999  # of the mean: the sum moves five times as far
