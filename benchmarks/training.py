"""Train small networks with each rule over learning rates: `python training.py [--write] [--short]`.

A rule works at a rate if the median over the seeds is near the best that any fixed threshold reaches at any rate: at
most 5 points of accuracy less, or at most 10% more loss or error. The width is the decades of rates at which it works.
Every finished part is kept in the results file, so a run that is interrupted goes on, and new rules are added to it.
"""

import argparse
import json
import math
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

# One thread for each process: then no process waits for another's threads, and results do not depend on their number.
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

from report import TRAINING, TRAINING_PICTURE
from training_figures import show
from training_picture import draw
from training_rules import INSTALLED, RULES, SHORT
from training_runs import trained
from training_tasks import TASKS

from gradclip._src.versions import installed_versions


def part(name, rules, rate_seeds, shorter):
    """Train one program's worth of runs; return (rule, rate, seed, figure) of each, and the seconds it took."""
    started, task = time.perf_counter(), TASKS[name](shorter)
    runs = [(rule, rate, seed) for rule in rules for rate, seed in rate_seeds]
    figures = trained(task, [(RULES[rule](), rate, seed) for rule, rate, seed in runs])
    return (
        name,
        [(*run, figure) for run, figure in zip(runs, figures.tolist(), strict=True)],
        time.perf_counter() - started,
    )


def parts(found, tasks, rules, seeds, shorter):
    """Yield what has not been trained yet, a rule and some rates and seeds at a time."""
    for name in tasks:
        task = TASKS[name](shorter)
        kept = found["tasks"].setdefault(name, described(task))["figures"]
        for rule in rules:
            rates = kept.setdefault(rule, {})
            todo = [(r, s) for r in task.rates for s in range(seeds) if str(s) not in rates.get(f"{r:g}", {})]
            for first in range(0, len(todo), task.together):
                yield name, [rule], todo[first : first + task.together], shorter


def described(task):
    return {"name": task.name, "figure": task.figure, "steps": task.steps, "rates": list(task.rates), "figures": {}}


def measured(found, todo, workers, keep):
    """Train all parts in processes, and call `keep` after each."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(part, *one) for one in todo]):
            name, runs, seconds = done.result()
            for rule, rate, seed, figure in runs:
                figures = found["tasks"][name]["figures"].setdefault(rule, {})
                figures.setdefault(f"{rate:g}", {})[str(seed)] = None if math.isnan(figure) else round(figure, 6)
            found["seconds"] = found.get("seconds", 0.0) + seconds
            keep(found)
            print(f"{name:<12} {runs[0][0]:<24} {len(runs):>3} runs {seconds:6.1f} s", flush=True)


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    options.add_argument("--rules", nargs="+", default=None, help=f"some of {', '.join(RULES)}")
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    options.add_argument("--short", action="store_true", help="few rules, rates and steps, one seed: five minutes")
    options.add_argument("--write", action="store_true", help="go on with the stored results, and store them again")
    chosen = options.parse_args()
    if chosen.short and chosen.write:
        options.error("--short trains for fewer steps: its figures must not be stored among the others")
    rules = chosen.rules or (SHORT if chosen.short else INSTALLED)
    found = json.loads(TRAINING.read_text()) if chosen.write and TRAINING.exists() else {"tasks": {}}
    found["versions"] = installed_versions()

    def keep(results):
        if chosen.write:
            TRAINING.write_text(json.dumps(results, indent=1) + "\n")

    todo = list(parts(found, chosen.tasks, rules, 1 if chosen.short else chosen.seeds, chosen.short))
    measured(found, todo, chosen.workers, keep)
    show(found)
    if chosen.write:
        draw(found, TRAINING_PICTURE)


if __name__ == "__main__":
    main()
