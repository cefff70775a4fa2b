"""Runs that are continued: every sum that was released counts, by dp-accounting's own composition."""

import copy
import io
import json
import pickle

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant

from gradclip import PoissonBatches, PrivateRun, clipped_sum_sensitivity

SUM = np.array([1.0, 2.0])
RATE, DELTA = 0.05, 1e-5
ANOTHER = {"rate": RATE, "releases": 4, "noise_multiplier": 1.0, "overflow": 0.0}


def batches_of(steps, rate=RATE, seed=None):
    return PoissonBatches(1000, rate, steps=steps, pad_to=128, seed=seed)


def run_of(steps=20, rate=RATE, seed=None, **settings):
    settings = settings if "epsilon" in settings else {"noise_multiplier": 1.0} | settings
    return PrivateRun(
        batches_of(steps, rate, seed), clipped_sum_sensitivity(1.0, batch_size=128), **{"delta": DELTA} | settings
    )


def release(run, count):
    """Release so many of the run's batches, and return them."""
    found = []
    for rows, _ in run.batches:
        run.add_noise(SUM)
        found.append(rows)
        if len(found) == count:
            break
    return found


def composed(*parts):
    """Return dp-accounting's epsilon of (rate, steps, multiplier), one after the other."""
    accountant = PLDAccountant()
    for rate, steps, multiplier in parts:
        accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(multiplier)), steps)
    return accountant.get_epsilon(DELTA)


def through(kind, state):
    """Return a state as it comes back from a file."""
    if kind == "json":
        return json.loads(json.dumps(state))
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("kind", ["json", "torch"])
@pytest.mark.parametrize("seed", [None, 0, np.random.PCG64, np.random.MT19937, np.random.Philox])
def test_a_loaded_run_goes_on_where_it_was(kind, seed):
    make = lambda: np.random.Generator(seed(5)) if isinstance(seed, type) else seed
    whole = [rows for rows, _ in batches_of(20, seed=make())]
    first = run_of(seed=make())
    before = release(first, 8)
    second = run_of(seed=make())
    second.load_state_dict(through(kind, first.state_dict()), lost=0)
    assert second.releases == 8
    assert second.epsilon() == first.epsilon() == pytest.approx(composed((RATE, 8, 1.0)), rel=1e-6)
    after = release(second, 99)
    assert len(after) == 12
    if seed is not None:
        assert np.array_equal([*before, *after], whole)
    assert second.epsilon() == pytest.approx(composed((RATE, 20, 1.0)), rel=1e-6)
    with pytest.raises(ValueError, match="all 20 sums of this run are released"):
        second.add_noise(SUM)


@pytest.mark.parametrize("seed", [None, 0, "generator"])
def test_what_a_crash_may_have_released_counts_and_its_batches_are_left_out(seed):
    make = lambda: np.random.default_rng(5) if seed == "generator" else seed
    whole = [rows for rows, _ in batches_of(20, seed=make())]
    first = run_of(seed=make(), save_every=3)
    release(first, 3)
    state = first.state_dict()
    second = run_of(seed=make(), save_every=3)
    second.load_state_dict(state)
    assert second.releases == 6
    state = second.state_dict()
    found = release(second, 3)
    if seed is not None:
        assert np.array_equal(found, whole[6:9])
    assert second.epsilon() == pytest.approx(composed((RATE, 9, 1.0)), rel=1e-6)


def test_a_run_that_saves_too_rarely_is_stopped():
    run = run_of(save_every=2)
    drawn = iter(run.batches)
    for _ in range(2):
        next(drawn)
        run.add_noise(SUM)
    next(drawn)
    with pytest.raises(ValueError, match=r"2 sums were released since state_dict\(\) was called"):
        run.add_noise(SUM)
    run.state_dict()
    run.add_noise(SUM)
    assert run.releases == 3


def test_other_settings_are_composed():
    first = run_of(10, noise_multiplier=1.5)
    release(first, 10)
    second = run_of(20, 0.04, noise_multiplier=0.9, state=first.state_dict())
    assert second.epsilon() == first.epsilon()
    release(second, 7)
    third = run_of(5, noise_multiplier=3.0, state=through("json", second.state_dict()))
    release(third, 2)
    wanted = composed((RATE, 10, 1.5), (0.04, 7, 0.9), (RATE, 2, 3.0))
    assert wanted * (1 - 1e-4) < third.epsilon() < wanted * (1 + 1e-3)
    resumed = run_of(5, noise_multiplier=3.0, state=second.state_dict())
    resumed.load_state_dict(third.state_dict(), lost=1)
    assert resumed.releases == 3
    assert "3 of 5 sums released, after 17 of earlier parts" in str(resumed)


def test_the_noise_of_what_follows_is_planned_with_what_was_released():
    first = run_of(10, epsilon=3)
    release(first, 10)
    assert first.epsilon() <= 3
    more = run_of(20, epsilon=3.3, state=first.state_dict())
    assert more.noise_multiplier > first.noise_multiplier
    wanted = composed((RATE, 10, first.noise_multiplier), (RATE, 20, more.noise_multiplier))
    assert 3.3 * 0.995 < more.epsilon(20) <= 3.3
    assert more.epsilon(20) == pytest.approx(wanted, rel=1e-3)
    with pytest.raises(ValueError, match=r"earlier parts of the run have spent epsilon .* and epsilon=2 is no more"):
        run_of(20, epsilon=2, state=first.state_dict())


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run))])
def test_a_copy_goes_on_and_ends(copied):
    whole = [rows for rows, _ in batches_of(20, seed=0)]
    run = run_of(seed=0)
    release(run, 10)
    other = copied(run)
    if other.batches is run.batches:
        other.releases = 20
    else:
        assert np.array_equal(release(other, 99), whole[10:])
    with pytest.raises(ValueError, match="all 20 sums of this run are released"):
        other.add_noise(SUM)
    assert run.releases == 10


@pytest.mark.parametrize(
    ("settings", "changed", "message"),
    [
        ({"steps": 21}, {}, "a run with steps=20, and this one has 21"),
        ({"rate": 0.04}, {}, "a run with rate=0.049[0-9]*, and this one has 0.039"),
        ({"noise_multiplier": 2.0}, {}, r"noise_multiplier=1\.0, and this one has 2\.0\. Make the run as it was made"),
        ({"rng": np.random.default_rng(0)}, {}, "draws the noise of the steps before again. Pass rng='system'"),
        ({}, {"unit": "group"}, "a run with unit='group'"),
        ({}, {"releases": 3}, "has other earlier parts or another grid"),
        ({}, {"parts": []}, "has other earlier parts or another grid"),
        ({"state": {"parts": [ANOTHER]}}, {}, "earlier parts"),
        ({}, {"batches": None}, "a run with n=None"),
    ],
)
def test_the_state_of_another_run_is_not_loaded(settings, changed, message):
    run = run_of()
    release(run, 4)
    other = run_of(**settings)
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(run.state_dict() | changed, lost=0)
    assert other.releases == 0


def test_a_coarser_grid_was_less_private():
    grids = [clipped_sum_sensitivity(1.0, batch_size=128, grid=grid) for grid in (80, 2**20)]
    coarse, fine = (PrivateRun(batches_of(20), one, delta=DELTA, noise_multiplier=1.0) for one in grids)
    for _ in range(4):
        coarse.add_noise(np.array([3, 4]))
    with pytest.raises(ValueError, match="has other earlier parts or another grid than this run"):
        fine.load_state_dict(coarse.state_dict(), lost=0)
    going_on = PrivateRun(batches_of(20), grids[0], delta=DELTA, noise_multiplier=1.0)
    going_on.load_state_dict(coarse.state_dict(), lost=0)
    assert going_on.epsilon() == coarse.epsilon()


def test_how_much_was_lost_has_to_be_said():
    run = run_of()
    release(run, 4)
    with pytest.raises(ValueError, match="has released 4 sums itself, which loading would forget"):
        run.load_state_dict(run.state_dict(), lost=0)
    other = run_of()
    with pytest.raises(TypeError, match="say how many sums were released after the state was saved: lost=0 if none"):
        other.load_state_dict(run.state_dict())
    for lost in (-1, 0.5, True):
        with pytest.raises(ValueError, match="lost must be a whole number"):
            other.load_state_dict(run.state_dict(), lost=lost)
    other.load_state_dict(run.state_dict(), lost=99)
    assert other.releases == 20
