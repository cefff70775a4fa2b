"""What losses and norms did, on rows whose answer is known."""

import math
import tracemalloc

import numpy as np
import pytest

from gradclip._src.monitor.records import Columns, Step
from gradclip._src.monitor.trend import Level, Losses, lost_from, medians_before

NOISE = np.random.default_rng(0).standard_normal(3000)


def judged(losses):
    return Losses.of(Columns.of([Step(i, 1.0, 1.0, loss=float(loss)) for i, loss in enumerate(losses, 1)]))


def level(norms, losses=None):
    columns = Columns.of([Step(i, float(norm), 1.0) for i, norm in enumerate(norms, 1)])
    return Level.of(columns, np.zeros(len(norms), bool), losses or Losses("unknown"))


@pytest.mark.parametrize("sign", [1, 1e-9, 1e200])
@pytest.mark.parametrize(
    ("losses", "kind"),
    [
        (np.linspace(2.3, 1.0, 300), "fell"),
        (np.geomspace(2.3, 0.01, 20), "fell"),
        (np.linspace(2.3, 3.0, 300), "rose"),
        (np.r_[np.linspace(2.3, 1.0, 100), np.linspace(1.0, 2.1, 200)], "rebounded"),
        (np.r_[np.linspace(2.3, 1.0, 100), np.full(200, 1.1)], "fell"),
        (np.full(300, 2.3), "flat"),
        (np.zeros(300), "flat"),
    ],
)
def test_kinds(losses, kind, sign):
    assert judged(sign * losses).kind == kind


def test_losses_may_be_negative():
    assert judged(np.linspace(-1.0, -9.0, 100)).kind == "fell"
    assert judged(np.linspace(-9.0, -1.0, 100)).kind == "rose"


def test_noise_alone_is_flat():
    kinds = [judged(1 + spread * NOISE[30 * i : 30 * i + 300]).kind for spread in (0.01, 0.3, 3.0) for i in range(90)]
    assert kinds.count("flat") >= 265


def test_a_trend_shows_through_noise_and_bad_batches():
    losses = np.linspace(3.0, 1.0, 300) + 0.5 * NOISE[:300]
    losses[::50] = 1e6
    assert judged(losses).kind == "fell"


def test_single_losses_that_are_missing_or_infinite_do_not_count():
    losses = np.linspace(2.3, 1.0, 300)
    losses[::3], losses[1::3] = math.nan, math.inf
    assert judged(losses).kind == "fell"
    losses[60:] = math.nan
    assert judged(losses).kind == "fell"
    losses[57:] = math.nan
    assert judged(losses).kind == "unknown"


def test_the_best_part_is_known_by_its_last_step():
    found = judged(np.r_[np.linspace(2.0, 1.0, 90), np.linspace(1.1, 3.0, 210)])
    assert (found.kind, found.best_until) == ("rose", 90)


def test_the_level_without_losses():
    found = level(np.r_[np.full(150, 1.0), np.full(150, 4.0)])
    assert (found.middle, found.first, found.last, found.top, found.healthy) == (4.0, 1.0, 4.0, 4.0, 1.0)
    assert (found.rise, found.unsteady, found.guard) == (4.0, True, 8.0)


def test_a_rise_leaves_room_for_more():
    assert level(np.r_[np.full(150, 1.0), np.full(150, 1.5)]).guard == 4.5


def test_the_healthy_level_is_of_the_steps_until_the_loss_was_best():
    losses = Losses("rose", 2.0, 1.0, 3.0, best_until=100)
    assert level(np.r_[np.full(100, 2.0), np.full(200, 9.0)], losses).healthy == 2.0


def test_norms_that_never_become_finite_again():
    norms = [1.0, math.nan, 1.0, *[math.inf] * 5]
    columns = Columns.of([Step(i, norm, 1.0) for i, norm in enumerate(norms, 11)])
    assert lost_from(columns) == 14
    assert lost_from(Columns(*(column[:-1] for column in columns))) is None
    assert lost_from(Columns.of([])) is None


def test_medians_are_of_the_steps_before():
    norms = np.arange(1.0, 301.0)
    found = medians_before(norms)
    assert np.isinf(found[:5]).all()
    assert found[5] == 3.0
    assert found[128] == np.median(norms[:128])
    assert found[299] == np.median(norms[171:299])
    assert medians_before(np.array([])).shape == (0,)


def test_medians_of_a_long_run_take_little_memory():
    norms = np.random.default_rng(0).random(100_000)
    tracemalloc.start()
    found = medians_before(norms)
    assert tracemalloc.get_traced_memory()[1] < 30e6  # all at once are 100 MB
    tracemalloc.stop()
    assert found[60_000] == np.median(norms[60_000 - 128 : 60_000])
    assert found[-1] == np.median(norms[-129:-1])


def test_a_fall_shows_through_noise_as_large_as_itself():
    kinds = [judged(np.linspace(2, 1, 300) + 0.8 * NOISE[30 * i : 30 * i + 300]).kind for i in range(90)]
    assert kinds.count("fell") >= 60


def test_a_loss_that_came_back_to_its_start_did_not_fall():
    assert judged(np.r_[np.full(9, 2.3), np.linspace(9.0, 2.4, 100), np.full(191, 2.3)]).kind == "flat"


def test_noise_is_the_factor_that_chance_explains():
    assert level(np.ones(100)).noise == 1.0
    assert 20 < level(np.exp(2 * NOISE[:300])).noise < 50
    assert level(np.array([1.0])).noise == 1.0
    assert level(np.tile([1e-300, 1e300], 50)).noise < math.inf
