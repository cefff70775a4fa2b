"""Loads each file in a process of its own, and prints in JSON what came of it, and how much more memory it took.

python in_little_memory.py gradclip|torch|numpy|safetensors FILES...
"""

import json
import os
import re
import signal
import sys
import warnings
from pathlib import Path

import torch

import loaded

LIMIT = 60  # seconds
LOADERS = {
    "gradclip": loaded.read,
    "torch": lambda path: torch.load(path, weights_only=True),
    "numpy": loaded.by_numpy,
    "safetensors": loaded.by_safetensors,
}


def peak():
    """Return the most resident memory so far, in bytes."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def attempt(load, path):
    """Return the name of an error, or an empty one, and how many bytes loading took."""
    before = peak()
    try:
        found = load(path)
        del found
        error = ""
    except Exception as raised:  # whatever a loader raises
        error = type(raised).__name__
    return error, peak() - before


def in_a_process(load, path):
    """Return what `attempt` does; the number of a signal in place of the error if the process came to its end by it."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(LIMIT)
        os.write(writing, json.dumps(attempt(load, path)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        said = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return json.loads(said) if said else (code, 0)


def main(loader, *paths):
    warnings.simplefilter("ignore")
    return {Path(path).name: in_a_process(LOADERS[loader], Path(path)) for path in paths}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])))
