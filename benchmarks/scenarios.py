"""Test rules for adaptive thresholds on histories of norms: `python scenarios.py [--write] [--seeds 3]`.

A rule is sound at a step if it keeps at least half of an ordinary norm and would clip norms above ten times the level.
A spike is a norm of a hundred times the level. The rule lets it through if more than ten times the level remains.
"""

import argparse
import math

import numpy as np
from bad_batches import accuracies
from published_rules import RULES
from report import SCENARIOS, SCENARIOS_PICTURE, write
from scenarios_picture import draw

STEPS, CHANGE = 4_000, 2_000
LEVEL, SPREAD = 0.5, 0.15
WITHIN = 500  # a rule without a sound step in the last steps, this many, is dead


class History:
    """Norms, the level at each step, and masks of ordinary steps and spikes."""

    def __init__(self, rng, level=LEVEL, spread=SPREAD):
        self.level = np.broadcast_to(np.asarray(level, float), STEPS).copy()
        self.norms = self.level * np.exp(spread * rng.standard_normal(STEPS))
        self.ordinary, self.spike = np.ones(STEPS, bool), np.zeros(STEPS, bool)

    def spiked(self, where):
        self.norms[where] *= 100.0
        self.spike[where], self.ordinary[where] = True, False
        return self

    def filled(self, where, value):
        self.norms[where], self.ordinary[where] = value, False
        return self


def jump(factor):
    return np.where(np.arange(STEPS) < CHANGE, LEVEL, LEVEL * factor)


def heavy(rng):
    history = History(rng)
    history.norms *= 1 + rng.pareto(3.0, STEPS)
    return history


def quantised(rng):
    """Round to bfloat16, which has eight significant bits."""
    history = History(rng)
    mantissa, exponent = np.frexp(history.norms)
    history.norms = np.ldexp(np.round(mantissa * 256), exponent - 8)
    return history


HISTORIES = {
    "stationary": History,
    "decay": lambda rng: History(rng, 5 * LEVEL * 50.0 ** (-np.arange(STEPS) / STEPS)),
    "level x3": lambda rng: History(rng, jump(3)),
    "level x30": lambda rng: History(rng, jump(30)),
    "level /30": lambda rng: History(rng, jump(1 / 30)),
    "spikes, 0.1%": lambda rng: History(rng).spiked(rng.random(STEPS) < 0.001),
    "spikes, 1%": lambda rng: History(rng).spiked(rng.random(STEPS) < 0.01),
    "bursts of 20": lambda rng: History(rng).spiked(np.arange(STEPS) % 400 >= 380),
    "spike at once": lambda rng: History(rng).spiked([0]),
    "spike at step 10": lambda rng: History(rng).spiked([10]),
    "one NaN": lambda rng: History(rng).filled([CHANGE], math.nan),
    "50 NaN": lambda rng: History(rng).filled(slice(CHANGE, CHANGE + 50), math.nan),
    "one infinity": lambda rng: History(rng).filled([CHANGE], math.inf),
    "2,000 zeros": lambda rng: History(rng).filled(slice(CHANGE - 1000, CHANGE + 1000), 0.0),
    "heavy tail": heavy,
    "bfloat16": quantised,
    "constant": lambda rng: History(rng, spread=0.0),
}
AFTER = {"level x3": CHANGE, "level x30": CHANGE, "level /30": CHANGE, "one NaN": CHANGE, "50 NaN": CHANGE}
AFTER |= {"one infinity": CHANGE, "2,000 zeros": CHANGE + 1000}
"""The step from which unsound steps count as recovery."""


def figures(make, history, since):
    """Return the share of ordinary steps clipped, spikes let through, unsound steps since the change, and more."""
    rule = make()
    left, limits = np.empty(STEPS), np.empty(STEPS)
    for step, norm in enumerate(history.norms.tolist()):
        left[step] = rule.after(norm)
        limits[step] = rule.limit
    settled = history.ordinary & ((np.arange(STEPS) >= 200) & (np.arange(STEPS) < since if since else True))
    sound = (left >= 0.5 * history.norms) & (limits <= 10 * history.level)
    unsound = history.ordinary & ~sound & (np.arange(STEPS) >= (since or STEPS))
    through = history.spike & ~(left <= 10 * history.level)
    return {
        "clipped": float(np.mean(~(left >= history.norms * (1 - 1e-6))[settled])),
        "through": int(through.sum()),
        "spikes": int(history.spike.sum()),
        "recovery": int(unsound.sum()),
        "dead": not bool(sound[-WITHIN:].any()),
        "passes NaN": bool(np.isnan(left[np.isnan(history.norms)]).any()),
    }


def together(found):
    """Combine the figures of several seeds: means, sums, and the worst recovery."""
    dead = sum(one["dead"] for one in found)
    return {
        "clipped": float(np.mean([one["clipped"] for one in found])),
        "through": sum(one["through"] for one in found),
        "spikes": sum(one["spikes"] for one in found),
        "recovery": max(one["recovery"] for one in found),
        "dead": dead * 2 > len(found),
        "passes NaN": any(one["passes NaN"] for one in found),
    }


def measured(rules=RULES, histories=HISTORIES, seeds=3):
    """Return the figures of each rule for each history, by name."""
    return {
        make.name: {
            name: together(
                [figures(make, history(np.random.default_rng(seed)), AFTER.get(name)) for seed in range(seeds)]
            )
            for name, history in histories.items()
        }
        for make in rules
    }


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--write", action="store_true", help="store the figures and the picture in benchmarks/results")
    chosen = options.parse_args()
    found = {"scenarios": measured(seeds=chosen.seeds), "training": accuracies(RULES, seeds=5)}
    for rule, of_histories in found["scenarios"].items():
        for name, one in of_histories.items():
            print(f"{rule:<20} {name:<18} {one}")
    for line in found["training"]:
        print(line)
    if chosen.write:
        write(found, SCENARIOS)
        draw(RULES, HISTORIES, SCENARIOS_PICTURE)


if __name__ == "__main__":
    main()
