"""Figures of the trainings: medians, the best rate, and the width of the rates that work."""

import math
from itertools import product

import numpy as np


def medians(task, rule):
    """Return the median over the seeds at each rate."""
    figures = task["figures"][rule]
    return [median(task, figures[f"{rate:g}"].values()) for rate in task["rates"]]


def median(task, figures):
    """Return the median of some runs' figures; infinity if the median run diverged, or 0 for accuracies."""
    worst = 0.0 if task["figure"] == "accuracy" else math.inf
    return float(np.median([worst if figure is None else figure for figure in figures]))


def better(task):
    """Return the function that picks the better of two figures: accuracies are to rise, losses and errors to fall."""
    return max if task["figure"] == "accuracy" else min


def best(task, rule):
    return better(task)(medians(task, rule))


def finished(task):
    """Return the rules that have been trained at all rates."""
    return [rule for rule, figures in task["figures"].items() if len(figures) == len(task["rates"])]


def fixed(task):
    return [rule for rule in finished(task) if rule.startswith("fixed")]


def best_fixed(task):
    """Return the best figure that any fixed threshold reaches at any rate."""
    return better(task)(best(task, rule) for rule in fixed(task))


def behind(task, rule):
    """Return by how much a rule is worse than the best fixed threshold, each at its best rate, with the standard error.

    Accuracies differ in points, losses and errors by a share of the best. The error is that of the difference of the
    medians if the seeds were drawn again: the standard deviation over all ways to draw as many of them with
    replacement, the same for both. Thresholds and rates are those chosen on all seeds, so the choice itself adds to it.
    """
    both = [_at_best(task, one) for one in (rule, max(fixed(task), key=lambda one: -_badness(task, best(task, one))))]
    worst = 0.0 if task["figure"] == "accuracy" else math.inf
    figures = np.array([[worst if one is None else one for one in of_rule] for of_rule in both])
    places = np.array(list(product(range(figures.shape[1]), repeat=figures.shape[1])))
    found, others = np.median(figures, 1), np.median(figures[:, places], 2)
    return _behind(task, *found), float(np.std(_behind(task, *others)))


def _behind(task, figure, goal):
    return goal - figure if task["figure"] == "accuracy" else figure / goal - 1


def _badness(task, figure):
    return -figure if task["figure"] == "accuracy" else figure


def _at_best(task, rule):
    """Return the figures of the seeds at the rate with the best median."""
    found = [_badness(task, one) for one in medians(task, rule)]
    return list(task["figures"][rule][f"{task['rates'][int(np.argmin(found))]:g}"].values())


def widest_fixed(task):
    return max(width(task, rule) for rule in fixed(task))


def margin(task, goal, figure):
    """Say by how much a figure is good enough; below 0 it is not: 5 points below the goal, or 10% above it."""
    if task["figure"] == "accuracy":
        return figure - (goal - 0.05)
    return math.log(1.1 * goal) - math.log(min(figure, 1e3))


def width(task, rule):
    """Return the decades of rates at which a rule works; between two rates the margin is interpolated."""
    rates, goal = np.log10(task["rates"]), best_fixed(task)
    margins = [margin(task, goal, figure) for figure in medians(task, rule)]
    return float(sum(map(_between, rates, rates[1:], margins, margins[1:])))


def _between(low, high, before, after):
    if before < 0 and after < 0:
        return 0.0
    if before >= 0 and after >= 0:
        return high - low
    return (high - low) * max(before, after) / abs(before - after)


def show(found):
    for task in found["tasks"].values():
        if not fixed(task):
            continue  # nothing to compare with
        print(f"\n{task['name']}, {task['figure']}; the best fixed threshold reaches {best_fixed(task):.4g}")
        print(" " * 24, *(f"{rate:7g}" for rate in task["rates"]), "   best  width")
        for rule in finished(task):
            print(
                f"{rule:<24}",
                *(f"{x:7.3f}" for x in np.minimum(medians(task, rule), 999)),
                f"{best(task, rule):7.3f} {width(task, rule):6.2f}",
            )
