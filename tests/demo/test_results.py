"""What trainings say about each kind of clipping, worked out by hand."""

import pytest
from rich.console import Console

from demo_results import Sweep, Trained


def trained(clipping, rate, *accuracy, clipped=0.0):
    return Trained(clipping, rate, accuracy, (clipped,) * len(accuracy), (False,) * len(accuracy))


@pytest.fixture
def sweep():
    return Sweep(
        [
            trained("none", 0.1, 0.1, 0.2, 0.3),
            trained("none", 0.01, 0.8, 0.7, 0.9),
            trained("fixed", 0.1, 0.79, 0.79, 0.9),
            trained("fixed", 0.01, 0.5, 0.6, 0.7),
            trained("adaptive", 0.1, 0.9, 0.95, 0.7, clipped=0.97),
            trained("adaptive", 0.01, 0.85, 0.85, 0.85),
        ],
        max_norm=0.5,
    )


def test_the_summary_follows_the_numbers(sweep):
    assert sweep.summary() == (
        "Median test accuracy of 3 seeds is at least 80% at learning rate 0.01 without clipping, at no learning rate "
        "with a fixed threshold of 0.5, and at learning rates 0.01 and 0.1 with an adaptive threshold at its defaults. "
        "Below are the norms of an adaptive run at rate 0.1: 97% of its steps are clipped, and at this rate the median "
        "accuracy is 90%, without clipping below 80%."
    )


def test_one_seed_and_one_rate_can_be_summed_up():
    one = Sweep([trained(kind, 1.0, 1.0) for kind in ("none", "fixed", "adaptive")], float("inf"))
    assert one.summary().startswith("Median test accuracy of 1 seed is at least 80% at learning rate 1 without ")
    assert "at learning rate 1 with a fixed threshold of inf" in one.summary()
    assert one.summary().endswith("median accuracy is 100%, without clipping 100%.")
    assert one.shown == 1.0


def test_rates_are_in_order_and_spread_over_the_seeds(sweep):
    assert sweep.rates == [0.01, 0.1]
    assert [one.median for one in sweep.of("none")] == [0.8, 0.2]
    assert sweep.at("adaptive", 0.1).spread == (0.7, 0.95)


def test_the_table_has_a_row_for_each_rate(sweep, capsys):
    Console(width=100).print(sweep.table())
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "rate no clipping fixed, 0.5 adaptive" in lines
    assert "0.01 80.0% (70.0 to 90.0) 60.0% (50.0 to 70.0) 85.0% (85.0 to 85.0)" in lines
    assert "0.1 20.0% (10.0 to 30.0) 79.0% (79.0 to 90.0) 90.0% (70.0 to 95.0)" in lines
