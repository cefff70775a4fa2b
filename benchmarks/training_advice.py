"""Follow `Monitor.advise` on the training tasks: `python training_advice.py [--write]`, after training.py.

At each learning rate, a run without clipping stops after a third of its steps. Its monitor has the norms and losses,
and proposes up to three thresholds. Each is trained with from the start, and the best final figure counts.
"""

import argparse
import json
import math

import training  # noqa: F401  first: it sets the number of threads
from published_rules import Fixed
from report import TRAINING, TRAINING_ADVICE, write
from training_figures import best_fixed, better, fixed, median, medians
from training_rules import NoClipping
from training_runs import trained
from training_tasks import TASKS

from gradclip import Monitor

SEEDS = 3


def advised(task, rates, seeds):
    """Return for each (rate, seed) the state and the thresholds to try, after a third of a run without clipping."""
    runs = [(rate, seed) for rate in rates for seed in range(seeds)]
    found = []
    for first in range(0, len(runs), task.together):
        some = runs[first : first + task.together]
        monitors = [Monitor(keep_spikes=0) for _ in some]

        def watch(losses, norms, left, monitors=monitors):
            for monitor, loss, norm in zip(monitors, losses.tolist(), norms.tolist(), strict=True):
                monitor.record(norm, math.inf, loss=loss)

        trained(task, [(NoClipping(), *run) for run in some], watch=watch, until=task.steps // 3)
        advice = [monitor.advise() for monitor in monitors]
        found += [(*run, one.state, one.try_values) for run, one in zip(some, advice, strict=True)]
    return found


def followed(task, kept, seeds=SEEDS):
    """Return what following the advice reaches at each rate, beside the best fixed threshold at that rate."""
    rows = advised(task, task.rates, seeds)
    todo = [(Fixed(value), rate, seed) for rate, seed, _, values in rows for value in values]
    figures = iter(trained(task, todo).tolist())
    runs = [
        {"rate": rate, "seed": seed, "state": state, "tried": values, "figures": [_kept(next(figures)) for _ in values]}
        for rate, seed, state, values in rows
    ]
    of_rates = [[_best(kept, run["figures"]) for run in runs if run["rate"] == rate] for rate in task.rates]
    of_fixed = zip(*(medians(kept, rule) for rule in fixed(kept)), strict=True)
    return {
        "name": kept["name"],
        "figure": kept["figure"],
        "best fixed": best_fixed(kept),
        "fixed": [better(kept)(found) for found in of_fixed],
        "advised": [median(kept, found) for found in of_rates],
        "runs": runs,
    }


def _best(kept, figures):
    return better(kept)((figure for figure in figures if figure is not None), default=None)


def _kept(figure):
    return None if math.isnan(figure) else round(figure, 6)


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    options.add_argument("--write", action="store_true", help="store the results")
    chosen = options.parse_args()
    found = json.loads(TRAINING_ADVICE.read_text()) if chosen.write and TRAINING_ADVICE.exists() else {"tasks": {}}
    kept = json.loads(TRAINING.read_text())["tasks"]
    for name in chosen.tasks:
        found["tasks"][name] = task = followed(TASKS[name](False), kept[name])
        for rate, fixed_, advised_ in zip(kept[name]["rates"], task["fixed"], task["advised"], strict=True):
            print(
                f"{name:<12} rate {rate:<8g} best fixed {fixed_:8.4g}   following the advice {advised_:8.4g}",
                flush=True,
            )
        if chosen.write:
            write(found, TRAINING_ADVICE)


if __name__ == "__main__":
    main()
