"""Time clipping on a GPU, with gradclip's kernels and without, beside PyTorch's, Opacus' and optax's calls and a floor.

The most telling rows come first, and each is written to results/gpu-NAME.json as soon as it is measured; NAME is the
device's. Rows are measured by processes of their own. A row that raises an error, takes too long or ends its process is
kept with the reason, and the others are measured. `--only` measures a part again, and keeps the rest of the file.

`--device cpu --small` rehearses all of it without a GPU. Such figures mean nothing: they go to a temporary folder.
"""

import argparse
import json
import os
import platform
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from importlib import metadata
from pathlib import Path

from gpu_results import name_of, shown, words
from report import RESULTS

HERE = Path(__file__).parent
PARTS = {"gpu_rows.py": 30, "gpu_private.py": 45, "gpu_jax.py": 90}
"""The processes, and how many seconds each has for a row. JAX compiles a program for each."""
STARTING = 90
"""Seconds until a process must answer for the first time: it imports frameworks."""
ENDING = 2
"""Seconds that are left for the end of a run."""
STARTS = 6
"""How often a process is started again at the row after one that failed."""
PACKAGES = ("gradclip", "torch", "triton", "jax", "optax", "opacus", "numpy")


class Results:
    """The file, written anew after each row."""

    def __init__(self, folder, keeps):
        self.folder, self.keeps = folder, keeps
        self.path, self.found = None, {"versions": versions(), "rows": []}

    def describe(self, described):
        if self.path is None:
            self.path = self.folder / name_of(described.get("device", "unknown"))
            if self.keeps and self.path.exists():
                self.found["rows"] = json.loads(self.path.read_text())["rows"]
        self.found = {**described, **self.found, **described}
        self.write()

    def add(self, row):
        self.found["rows"] = [one for one in self.found["rows"] if words(one) != words(row)] + [row]
        print(shown(row), flush=True)
        self.write()

    def stop(self, where):
        print(f"stopped at {where}: the seconds are over", flush=True)
        self.found["stopped at"] = where
        self.write()

    def write(self):
        if self.path is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            new = self.path.with_suffix(".new")
            new.write_text(json.dumps(self.found, indent=1) + "\n")
            new.replace(self.path)


def versions():
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


class Worker:
    """A process that measures rows, and says a line of JSON before and after each."""

    def __init__(self, script, options, start):
        command = [sys.executable, str(HERE / script), "--device", options.device, "--only", options.only]
        command += ["--turns", str(options.turns), "--start", str(start), *(["--small"] if options.small else [])]
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if options.device == "cpu":
            environment["JAX_PLATFORMS"] = "cpu"
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)
        self.lines, self.said = queue.Queue(), deque(maxlen=1)
        self.threads = [threading.Thread(target=target, daemon=True) for target in (self._listen, self._read)]
        for thread in self.threads:
            thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        for thread in self.threads:
            thread.join()
        self.process.stdout.close()
        self.process.stderr.close()

    def _listen(self):
        self.said.extend(line for line in self.process.stderr if line.strip())

    def _read(self):
        for line in self.process.stdout:
            self.lines.put(json.loads(line))
        self.lines.put(None)

    def message(self, seconds):
        """Return the next message, or None at the end. Raise queue.Empty if there is none in time."""
        return self.lines.get(timeout=max(seconds, 0.0))

    def ended(self):
        """Return why the process ended, or None if it ended well."""
        code = self.process.wait()
        self.threads[0].join()
        return None if code == 0 else f"the process ended with {code}: {''.join(self.said).strip()}"


def follow(worker, part, limit, results, deadline):
    """Keep the rows of a process. Return the number of the row at which another goes on, or None."""
    row, next_row, patience = None, None, STARTING
    while True:
        try:
            message = worker.message(min(patience, deadline - time.monotonic()))
        except queue.Empty:
            if time.monotonic() >= deadline:
                results.stop(words(row or {"workload": part}))
                return None
            results.add({**(row or {"workload": part}), "error": f"took more than {patience} seconds"})
            return next_row
        if message is None:
            reason = worker.ended()
            if reason and (row or next_row is None):
                results.add({**(row or {"workload": part}), "error": reason})
            return next_row if reason else None
        if "described" in message:
            results.describe(message["described"])
        elif "begins" in message:
            row, next_row = message["begins"], message["at"] + 1
        else:
            results.add(message["row"])
            row = None
        patience = limit


def measure(options):
    results = Results(options.out, keeps=bool(options.only))
    deadline = time.monotonic() + options.seconds - ENDING
    for part, limit in PARTS.items():
        start, begun = 0, time.monotonic()
        for _ in range(STARTS):
            if start is None or time.monotonic() >= deadline:
                break
            with Worker(part, options, start) as worker:
                start = follow(worker, part, limit, results, deadline)
        print(f"{part}: {time.monotonic() - begun:.0f} s", flush=True)
    if results.path is None:
        results.describe({})
    print(f"written: {results.path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="for the whole run")
    parser.add_argument("--turns", type=float, default=0.4, help="seconds in which the contenders of a row take turns")
    parser.add_argument("--only", default="", help="rows whose words match this regular expression")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="tiny tensors, for rehearsals")
    parser.add_argument("--out", type=Path, help="the folder of the file; benchmarks/results if not given")
    options = parser.parse_args()
    rehearsal = options.small or options.device == "cpu"
    options.out = options.out or (Path(tempfile.mkdtemp()) if rehearsal else RESULTS)
    measure(options)


if __name__ == "__main__":
    main()
