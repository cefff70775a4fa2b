"""The table: a row for each seed and a median for each run, with words where there is no number."""

import math

import numpy as np
from rich.console import Console

from gradclip.demo.results import Curves, describe_run, results_table


def test_rows_say_what_was_measured(capsys):
    curves = Curves(
        np.array([[2.0, 0.1], [2.0, math.nan]]),
        np.array([[0.5, 1.5], [math.nan, math.nan]]),
        np.ones((2, 2)),
        np.array([0.75, 0.25]),
    )
    Console(width=100).print(results_table((describe_run("with gradclip", curves),)))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    for row in (
        ["with", "gradclip"],
        ["seed", "0", "yes", "75.0%", "0", "1.5", "never", "50%"],
        ["seed", "1", "diverged", "25.0%", "1", "none", "step", "1", "0%"],
        ["median", "50.0%", "0.5", "25%"],
    ):
        assert row in rows
