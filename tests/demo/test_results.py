"""What curves say about a run, worked out by hand."""

import math

import numpy as np

from gradclip.demo.results import describe_run, summarise
from gradclip.demo.settings import DemoSettings
from gradclip.demo.training import Curves


def curves(losses, norms, max_norm):
    return Curves(np.array(losses), np.array(norms), np.full(np.shape(norms), max_norm), np.full(len(losses), 0.25))


def test_a_run_is_described_by_literal_numbers():
    measured = curves(
        losses=[[2.0, 1.0, 0.5, 0.1], [2.0, 3.0, math.nan, math.nan], [2.0, 2.0, math.inf, 2.0]],
        norms=[[0.5, 1.0, 1.5, 4.0], [1.5, math.inf, math.nan, math.nan], [math.nan] * 4],
        max_norm=1.0,
    )
    learned, diverged, stalled = describe_run("run", measured).seeds
    assert (learned.outcome, diverged.outcome, stalled.outcome) == (
        "learned",
        "diverged",
        "not learned",
    )
    assert (learned.final_loss, diverged.final_loss, stalled.final_loss) == (0.1, None, 2.0)
    # A norm equal to the threshold is not clipped, and one that is not finite does not count.
    assert (learned.clipped_share, diverged.clipped_share) == (0.5, 0.25)
    assert (learned.largest_finite_norm, stalled.largest_finite_norm) == (4.0, None)
    assert (learned.first_nonfinite_norm_step, diverged.first_nonfinite_norm_step) == (None, 2)
    assert (diverged.nonfinite_loss_steps, stalled.nonfinite_loss_steps) == (2, 1)


def test_the_summary_follows_the_numbers():
    good = describe_run("good", curves([[0.1], [0.2]], [[1.0], [1.0]], 1.0))
    bad = describe_run("bad", curves([[2.3], [math.nan]], [[1.0], [math.nan]], math.inf))
    settings = DemoSettings(steps=1, seeds=2, learning_rate=0.5, max_norm=1.0)
    assert summarise(bad, good, good, settings) == (
        "Without clipping, 0 of 2 seeds learned and 1 diverged (test accuracy 25.0% to 25.0%, "
        "median 25.0%); with gradclip at max_norm 1, 2 of 2 seeds learned (test accuracy 25.0% to "
        "25.0%, median 25.0%); with a threshold that follows the norms, 2 of 2 seeds learned (test accuracy 25.0% to "
        "25.0%, median 25.0%); all after 1 steps at learning rate 0.5."
    )
    assert summarise(good, bad, bad, settings).startswith("Without clipping, 2 of 2 seeds learned (")
