"""Time calls of two copies of gradclip's source in turns, each in a process of its own.

A process gets one question at a time, so that it is alone on the machine while it measures.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

WITH_SOURCE = Path(__file__).resolve().parents[1] / "scripts" / "with_source.py"
PEERS = ("torch.", "torch ", "plain ", "timm", "PyTorch")
"""How the names of calls of other libraries begin: they are the same in both copies."""


def answer(cases, clock):
    """Answer questions from stdin: what the cases are, and how long one call of a contender takes, in seconds.

    `cases` are functions that return contenders, by name. Those of one case are kept until another is asked about.
    `clock` returns seconds.
    """
    out = os.dup(1)
    os.dup2(2, 1)  # what calls print does not get between the answers
    kept, contenders = None, {}
    for line in sys.stdin:
        case, name, calls = json.loads(line)
        if case != kept:
            contenders.clear()
            kept, contenders = case, own(cases[case]())
        found = list(contenders) if name is None else seconds_of(contenders[name], calls, clock)
        os.write(out, (json.dumps(found) + "\n").encode())


def own(contenders):
    """Return the contenders without those of other libraries."""
    return {name: call for name, call in contenders.items() if not name.startswith(PEERS)}


def seconds_of(call, calls, clock):
    """Return the median time of some calls, after the one that was made before each."""
    call, prepare = call if isinstance(call, tuple) else (call, lambda: None)
    taken = []
    for _ in range(calls + 1):
        prepare()
        start = clock()
        result = call()
        taken.append(clock() - start)
        del result
    return statistics.median(taken[1:])


class Copy:
    """A process that measures calls of one copy of the source."""

    def __init__(self, source, script, *options):
        command = [sys.executable, WITH_SOURCE, str(source), script, "--answer", *options]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def ask(self, case, name=None, calls=0):
        self.process.stdin.write(json.dumps([case, name, calls]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def compare(script, sources, cases, repeats, seconds):
    """Print the time of each call in both copies, and the ratio of the medians over all turns.

    `script` is a command whose option --answer calls `answer`; `sources` are the folders of the new and the old copy.
    A turn of a copy is some calls that take about a hundredth of a second together.
    """
    copies = {which: Copy(source, *script) for which, source in zip(("new", "old"), sources, strict=True)}
    print(f"{'milliseconds':<85} {'old':>10}    {'new':>10}    new / old")
    try:
        for case in cases:
            names = [name for name in copies["new"].ask(case) if name in copies["old"].ask(case)]
            for name in names:
                show(case, name, taken(copies, case, name, repeats, seconds))
    finally:
        for copy in copies.values():
            copy.close()


def taken(copies, case, name, repeats, seconds):
    """Return the median milliseconds of one call in each copy."""
    once = copies["new"].ask(case, name, 2)
    calls = max(1, min(200, int(0.01 / max(once, 1e-7))))
    times = {which: [] for which in copies}
    end = time.perf_counter() + seconds
    while len(times["new"]) < repeats or time.perf_counter() < end:
        for which in random.sample(list(copies), len(copies)):
            times[which].append(copies[which].ask(case, name, calls))
    return {which: 1e3 * statistics.median(some) for which, some in times.items()}


def show(case, name, found):
    ratio = found["new"] / found["old"]
    print(f"{case:<52} {name:<32} {found['old']:10.4f} -> {found['new']:10.4f} ms {ratio:7.3f}", flush=True)
