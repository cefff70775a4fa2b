"""Lines of the tables about rules for thresholds."""

import math

from report import head
from training_figures import behind, best, best_fixed, better, margin, widest_fixed, width

BY_LAYER = ("SpreadRule by layer", "SteadyRule by layer", "twice the median by layer", "AdaGC by layer")
OF_OTHERS = ("AGC 0.01", "update RMS 1", "ZClip", "AutoClip", "smartclip", "SPAM", "none")
COMPARED = ("AdaptiveThreshold", "SteadyRule", "twice the median", *BY_LAYER, *OF_OTHERS)


def of_best(tasks):
    """Return a line for each rule: the best figure on each task at the best learning rate."""
    lines = head("best figure", *(f"{task['name']}, {task['figure']}" for task in tasks.values()))
    lines += _line("fixed, the best of nine", [_figure(task, best_fixed(task)) for task in tasks.values()])
    return lines + "".join(
        _line(rule, [_figure(task, best(task, rule)) for task in tasks.values()]) for rule in COMPARED
    )


def of_doubt(tasks):
    """Return a line for each rule of gradclip: how far it is behind the best fixed threshold, and how sure that is."""
    lines = head("behind the best fixed threshold", *(task["name"] for task in tasks.values()))
    for rule in ("AdaptiveThreshold", "SteadyRule"):
        cells = [(*behind(task, rule), " points" * (task["figure"] == "accuracy") or "%") for task in tasks.values()]
        lines += _line(rule, [f"{100 * by:+.1f} ± {100 * error:.1f}{unit}" for by, error, unit in cells])
    return lines


def of_widths(tasks):
    """Return a line for each rule: the decades of learning rates at which it works on each task."""
    lines = head("decades of learning rates", *(task["name"] for task in tasks.values()))
    lines += _line("fixed, the widest of nine", [f"{widest_fixed(task):.2f}" for task in tasks.values()])
    return lines + "".join(_line(rule, [f"{width(task, rule):.2f}" for task in tasks.values()]) for rule in COMPARED)


def of_advice(tasks):
    """Return a line for each task: what following the advice reaches, at the best rate and over the rates."""
    lines = head(
        "",
        "best fixed threshold",
        "following the advice",
        "rates where a fixed threshold works",
        "where the advice works",
    )
    for task in tasks.values():
        advised, fixed = task["advised"], task["fixed"]
        able = [place for place, figure in enumerate(fixed) if margin(task, task["best fixed"], figure) >= 0]
        followed = [place for place in able if margin(task, task["best fixed"], advised[place]) >= 0]
        cells = [_figure(task, task["best fixed"]), _figure(task, better(task)(advised)), len(able), len(followed)]
        lines += _line(task["name"], map(str, cells))
    return lines


def of_calm(found):
    """Return a line for each rule: the shares of ordinary steps clipped."""
    calm = ("stationary", "decay", "heavy tail", "bfloat16", "constant")
    lines = head("ordinary steps clipped", *calm)
    for rule, histories in found.items():
        cells = [f"{100 * histories[name]['clipped']:.1f}%" for name in calm]
        lines += f"| {rule} | {' | '.join(cells)} |\n"
    return lines


def of_spikes(found):
    """Return a line for each rule: the spikes let through."""
    spiky = ("spikes, 0.1%", "spikes, 1%", "bursts of 20", "spike at step 10", "spike at once")
    lines = head("spikes let through", *spiky)
    for rule, histories in found.items():
        cells = [f"{histories[name]['through']} of {histories[name]['spikes']}" for name in spiky]
        lines += f"| {rule} | {' | '.join(cells)} |\n"
    return lines


def of_recoveries(found):
    """Return a line for each rule: the steps to recover, and whether it passes NaN on."""
    changes = ("level x3", "level x30", "level /30", "one NaN", "2,000 zeros")
    lines = head("", *changes, "passes NaN on")
    for rule, histories in found.items():
        cells = ["never" if histories[name]["dead"] else f"{histories[name]['recovery']:,}" for name in changes]
        lines += f"| {rule} | {' | '.join(cells)} | {'yes' if histories['one NaN']['passes NaN'] else 'no'} |\n"
    return lines


def of_trainings(found):
    """Return a line for each rule: the mean and the lowest accuracy over the seeds."""
    kinds = [kind for kind in found[0] if kind != "rule"]
    lines = head("mean, least", *kinds)
    for row in found:
        cells = [f"{100 * sum(row[kind]) / len(row[kind]):.1f}%, {100 * min(row[kind]):.1f}%" for kind in kinds]
        lines += f"| {row['rule']} | {' | '.join(cells)} |\n"
    return lines


def _figure(task, figure):
    if task["figure"] == "accuracy":
        return f"{figure:.1%}"
    return f"{figure:.3f}" if math.isfinite(figure) else "diverged"


def _line(name, cells):
    return f"| {name} | {' | '.join(cells)} |\n"
