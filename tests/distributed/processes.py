"""Start a script once for each of several processes that know each other, and wait no longer than a time limit."""

import ast
import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HELPERS = ("mesh", "network", "layouts", "whole_gradients", "of_one_process")
"""Functions of the scripts that take nothing and are no cases."""
ON_THIS_MACHINE = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Ended:
    """A process that has ended: its exit status and what it printed."""

    status: int
    output: str
    errors: str


@cache
def prepared():
    """Return a process that has imported what scripts need. It forks itself for those that run them."""
    environment = os.environ | ON_THIS_MACHINE
    started = subprocess.Popen(
        [sys.executable, str(HERE / "forks.py")],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert started.stdout.readline() == "ready\n"
    return started


def end(*, at_once=False):
    """End the process that is forked, where there is one, and with `at_once` what it has started."""
    if not prepared.cache_info().currsize:
        return
    process = prepared()
    prepared.cache_clear()
    if at_once:
        os.killpg(process.pid, signal.SIGKILL)
    process.stdin.close()
    process.stdout.close()
    process.wait()


atexit.register(end, at_once=True)


def runs(group):
    """Say whether any process of a group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def run(world, script, *arguments, timeout=60, settings=None):
    """Run `script` in `world` processes, and return how each ended. Raises TimeoutError where one is not done.

    `settings` are variables of their environment.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        statuses = _statuses(folder, world, [str(HERE / script), *arguments], timeout, settings or {})
        return [
            Ended(status, (folder / f"out{rank}").read_text(), (folder / f"err{rank}").read_text())
            for rank, status in enumerate(statuses)
        ]


def _statuses(folder, world, command, timeout, settings):
    common = os.environ | ON_THIS_MACHINE | {"STORE": str(folder / "store"), "WORLD_SIZE": str(world)} | settings
    environments = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    process = prepared()
    print(
        json.dumps({"folder": str(folder), "environments": environments, "command": command}),
        file=process.stdin,
        flush=True,
    )
    if select.select([process.stdout], [], [], timeout)[0]:
        return json.loads(process.stdout.readline())
    end(at_once=True)
    errors = [path.read_text()[-2000:] for path in sorted(folder.glob("err*"))]
    raise TimeoutError(f"not done after {timeout} s:\n" + "\n".join(errors))


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
def outcome(world, names):
    return results(world, "several.py", *names, timeout=240)


def names_of_cases(script):
    """Return the names of the cases in a script, without running it."""
    tree = ast.parse((HERE / script).read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [one.name for one in functions if not (one.args.args or one.args.kwonlyargs) and one.name not in HELPERS]


def cases(*scripts):
    """Return a mark that runs a test for each case of scripts: pairs of a number of processes and a file."""
    params = [
        pytest.param(world, script, case, id=f"{world}-{script.removesuffix('.py')}-{case}")
        for world, script in scripts
        for case in names_of_cases(script)
    ]
    return pytest.mark.parametrize(("world", "script", "case"), params)


def check(items, world, script, case):
    """Check that no process had anything to say against a case; `items` are all tests of this run."""
    found, name = outcome(world, names_in(items, world)), f"{script}:{case}"
    assert found.get(name) == dict.fromkeys(range(world)), found.get(name) or found.get("ended")


def names_in(items, world):
    """Return the cases that tests run in so many processes, each behind the name of its script.

    They all run in the same processes, since joining them takes most of the time.
    """
    params = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return tuple(
        f"{one['script']}:{one['case']}"
        for one in params
        if {"script", "world"} <= one.keys() and one["world"] == world
    )
