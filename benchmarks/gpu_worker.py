"""A process that measures rows for gpu.py, and prints a line of JSON before and after each.

gpu.py ends a process whose row takes too long, and starts another at the next row. So nothing that a row does to the
device or to its process can harm another.
"""

import argparse
import json
import os
import re
from typing import NamedTuple


class Row(NamedTuple):
    """What is timed: a call for gradients of a workload, and whether it clips."""

    workload: str
    dtype: str
    call: str
    case: str


def chosen(plan, only):
    """Return the rows whose words match a regular expression."""
    return [row for row in plan if re.search(only, ", ".join(row))]


def text_of(error):
    """Return the first line of what an error says."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def options_of(description):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="tiny tensors, for rehearsals")
    parser.add_argument("--only", default="", help="rows whose words match this regular expression")
    parser.add_argument("--turns", type=float, default=0.4, help="seconds in which the contenders of a row take turns")
    parser.add_argument("--start", type=int, default=0, help="the number of the first row")
    return parser.parse_args()


def answer(options, plan, prepare):
    """Measure the rows of a plan. `prepare` returns the device, what is known of it, and what measures a row."""
    out = os.dup(1)
    os.dup2(2, 1)  # what calls print does not get between the answers

    def say(**message):
        os.write(out, (json.dumps(message) + "\n").encode())

    device, described, measure = prepare(options)
    say(described=described)
    for at, row in list(enumerate(chosen(plan, options.only)))[options.start :]:
        say(begins=row._asdict(), at=at)
        try:
            found = measure(row)
        except Exception as error:
            found = {"error": text_of(error)}
        say(row={**row._asdict(), **found})
        device.wait()  # raises if the device is of no more use: a new process goes on
