"""Attack gradclip with random cases for as long as is wished, and print how to repeat each that finds something.

python tests/attack/run.py --minutes 30 [--seed N] [--only trees [--number K]]

In the environment of the trainers, which has Flower, this runs the attacks that need it, and no others.
"""

import argparse
import importlib.util
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SHOWN = 3000
"""Characters of an error that are printed."""
REPORTS = 60
"""Seconds from one line of progress to the next."""


def prepare():
    """Let modules be found as pytest finds them, and JAX have eight devices."""
    sys.path[:0] = [str(TESTS / name) for name in (".", "support", "exact", "distributed", "trainers")]
    from eight_devices import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    warnings.simplefilter("error")


def attacks():
    """Return the attacks by name: each draws one case from a generator of random numbers, and checks it."""
    if importlib.util.find_spec("flwr"):
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of what Flower imports
            from attack import clients
        return {"clients": clients.attack}
    from attack import (
        adaptive,
        at_step,
        backward,
        compiled,
        counters,
        derivatives,
        eager,
        folded,
        groups,
        idle,
        layouts,
        logs,
        monitors,
        places,
        private,
        settings,
        sharing,
        tapes,
        trees,
        wrapped,
    )

    return {
        "trees": trees.attack,
        "counters": counters.attack,
        "derivatives": derivatives.attack,
        "private": private.attack,
        "places": places.attack,
        "layouts": layouts.attack,
        "settings": settings.attack,
        "sharing": sharing.attack,
        "folded": folded.attack,
        "groups": groups.attack,
        "at_step": at_step.attack,
        "wrapped": wrapped.attack,
        "idle": idle.attack,
        "tapes": tapes.attack,
        "logs": logs.attack,
        "eager": eager.attack,
        "compiled": compiled.attack,
        "monitors": monitors.attack,
        "backward": backward.attack,
        "adaptive": adaptive.attack,
        "processes": layouts.over_processes,
        "mistakes": layouts.mistakes,
    }


def case(name, seed, number):
    """Try one case; return what it found, or None."""
    import numpy as np

    try:
        attacks()[name](np.random.default_rng([seed, number]))
    except Exception as error:
        said = str(error)[:SHOWN]
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {said}\n  at {Path(where.filename).name}:{where.lineno}"
    return None


def run(names, seed, seconds):
    """Try cases until the time is over, of the attack that has had the least of it; return how many found something."""
    spent = dict.fromkeys(names, 0.0)
    tried, found = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    start = reported = time.monotonic()
    while (now := time.monotonic()) < start + seconds:
        name = min(spent, key=spent.__getitem__)
        problem = case(name, seed, tried[name])
        if problem:
            found[name] += 1
            report(name, seed, tried[name], problem)
        tried[name] += 1
        spent[name] += time.monotonic() - now
        if now > reported + REPORTS:
            reported = now
            print(f"after {now - start:.0f} s: {summary(tried, found)}", flush=True)
    print(summary(tried, found))
    return sum(found.values())


def summary(tried, found):
    return ", ".join(f"{name} {found[name]} of {tried[name]}" for name in tried)


def report(name, seed, number, problem):
    print(f"FOUND by {name}, seed {seed}, number {number}: {problem}")
    print(f"  again: python tests/attack/run.py --only {name} --seed {seed} --number {number}\n", flush=True)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (30)")
    parser.add_argument("--seed", type=int, help="of the random numbers; one is drawn and printed if left out")
    parser.add_argument("--only", help="one attack instead of all")
    parser.add_argument("--number", type=int, help="with --only and --seed: repeat one case")
    asked = parser.parse_args(arguments)
    known = attacks()
    if asked.only not in (None, *known):
        parser.error(f"--only must be one of {', '.join(known)}, got {asked.only!r}")
    if asked.number is not None and (asked.only is None or asked.seed is None):
        parser.error("--number goes with --only and --seed, which say of what")
    seed = time.time_ns() % 2**32 if asked.seed is None else asked.seed
    if asked.number is not None:
        problem = case(asked.only, seed, asked.number)
        print(problem or "nothing found")
        return bool(problem)
    print(f"seed {seed}, {asked.minutes:g} minutes", flush=True)
    return bool(run([asked.only] if asked.only else list(known), seed, 60 * asked.minutes))


if __name__ == "__main__":
    prepare()
    sys.exit(main())
