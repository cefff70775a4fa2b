"""What a process of its own measures for private_steps.py: times and memory of the contenders of one network."""

import json
import os
import resource
import time
from functools import partial
from importlib import import_module

from private_networks import PLAIN, WORKLOADS, perceptron
from timing import medians_of_clocks

LONG = 0.3
"""Calls that take more seconds are made few times."""
MODULES = {"JAX": "jax", "PyTorch": "torch"}


def answer(question):
    """Print the rows that a question asks for, as JSON."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: question["threads"]])
    limit = int(0.9 * of_memory("/proc/meminfo", "MemAvailable"))
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    makers = contenders(question)
    print(json.dumps(measured({name: makers[name] for name in question["names"]}, limit, question)))


def contenders(question):
    """Return functions that make contenders, by name, for a network or for a perceptron of a given width."""
    module = MODULES[question["framework"]]
    networks, framework = (import_module(f"private_{name}") for name in (f"networks_{module}", module))
    network, width = networks.NETWORKS[question["network"]], question.get("width")
    if width:
        network = partial(networks.perceptron, perceptron(width))
    return framework.contenders(network, WORKLOADS[question["network"]].data(question["batch"]))


def measured(makers, limit, question):
    """Return a row for each contender. A row without figures has the reason."""
    calls, rows, growths, long = {}, [], {}, set()
    for name, make in makers.items():
        try:
            call = made(make, limit)
            start = time.perf_counter()
            growths[name] = growth_of_process(call)
        except Exception as error:
            if name == PLAIN or (name.startswith("gradclip") and not fails_well(name, error)):
                raise
            rows.append({"name": name, "reason": f"{type(error).__name__}: {error}".splitlines()[0]})
        else:
            calls[name] = call
            long |= {name} if time.perf_counter() - start > LONG else set()
    times = medians_of_clocks(calls, question["repeats"], question["seconds"], long, question["few"])
    for name, call in calls.items():
        wall, processor = times[name]
        size = growths[name] if question["large"] else call.memory()
        rows.append({"name": name, "wall ms": wall, "processor ms": processor, "bytes": size})
    return rows


def fails_well(name, error):
    """Say whether an error of gradclip is one of memory, or says what "ghost" does not measure."""
    return isinstance(error, MemoryError) or "allocate" in str(error) or name == "gradclip, ghost"


def made(make, limit):
    """Return a contender. Raise a MemoryError if it needs more than `limit` bytes."""
    call = make()
    if call.needs() > limit:
        raise MemoryError(f"needs {call.needs() / 2**30:.1f} GiB")
    return call


def growth_of_process(call):
    """Return the bytes by which the process grows during a call."""
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")  # forgets the largest size so far
    before = of_memory("/proc/self/status", "VmRSS")
    call()
    return of_memory("/proc/self/status", "VmHWM") - before


def of_memory(file, key):
    """Return an entry of a file in /proc in bytes."""
    with open(file) as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
