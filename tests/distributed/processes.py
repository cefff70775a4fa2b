"""Start a script once for each of several processes that know each other, and wait no longer than a time limit."""

import ast
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HELPERS = ("mesh", "network", "layouts", "whole_gradients", "of_one_process")
"""Functions of the scripts that take nothing and are no cases."""


@dataclass(frozen=True)
class Ended:
    """A process that has ended: its exit status and what it printed."""

    status: int
    output: str
    errors: str


def run(world, script, *arguments, timeout=60):
    """Run `script` in `world` processes, and return how each ended. Raises TimeoutError where one is not done."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started = [_start(folder, rank, world, [str(HERE / script), *arguments]) for rank in range(world)]
        try:
            _wait(started, timeout, folder)
        finally:
            for process in started:
                process.kill()
                process.wait()
        return [
            Ended(process.returncode, (folder / f"out{rank}").read_text(), (folder / f"err{rank}").read_text())
            for rank, process in enumerate(started)
        ]


def _start(folder, rank, world, command):
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "STORE": str(folder / "store")}
    environment |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    with (folder / f"out{rank}").open("w") as out, (folder / f"err{rank}").open("w") as err:
        return subprocess.Popen([sys.executable, *command], env=os.environ | environment, stdout=out, stderr=err)


def _wait(started, timeout, folder):
    end = time.monotonic() + timeout
    for process in started:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            errors = [path.read_text()[-2000:] for path in sorted(folder.glob("err*"))]
            raise TimeoutError(f"not done after {timeout} s:\n" + "\n".join(errors)) from None


def results(world, script, *arguments, timeout=60):
    """Return for each case that the processes of a script report what went wrong on each of them; nothing is good."""
    found = {}
    for rank, ended in enumerate(run(world, script, *arguments, timeout=timeout)):
        for line in filter(lambda line: line.startswith("{"), ended.output.splitlines()):
            case = json.loads(line)
            found.setdefault(case["name"], {})[rank] = case["problem"]
        if ended.status:
            found.setdefault("ended", {})[rank] = ended.errors[-3000:] or f"status {ended.status}"
    return found


@cache
def outcome(world, script):
    return results(world, script, timeout=240)


def names_of_cases(script):
    """Return the names of the cases in a script, without running it."""
    tree = ast.parse((HERE / script).read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [one.name for one in functions if not (one.args.args or one.args.kwonlyargs) and one.name not in HELPERS]


def cases(*scripts):
    """Return a mark that runs a test for each case of scripts: pairs of a number of processes and a file.

    Each script runs all of its cases in the same processes, since starting them takes most of the time.
    """
    params = [
        pytest.param(world, script, case, id=f"{world}-{script.removesuffix('.py')}-{case}")
        for world, script in scripts
        for case in names_of_cases(script)
    ]
    return pytest.mark.parametrize(("world", "script", "case"), params)


def check(world, script, case):
    """Check that no process had anything to say against a case."""
    found = outcome(world, script)
    assert found.get(case) == dict.fromkeys(range(world)), found.get(case) or found.get("ended")
