"""Gradients that several processes hold, beside what one process makes of the same gradients.

Each script runs all of its cases in the same processes, since starting them takes most of the time.
"""

import ast
import json
import signal
from functools import cache

import pytest

import processes


@cache
def outcome(world, script):
    return processes.results(world, script, timeout=240)


def cases(script):
    """Return the names of the cases in a script, without running it."""
    tree = ast.parse((processes.HERE / script).read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [node.name for node in functions if not node.args.args and node.name not in processes.HELPERS]


SCRIPTS = [
    (2, "functions.py"),
    (2, "one_dimension.py"),
    (3, "one_dimension.py"),
    (4, "two_dimensions.py"),
    (4, "drawn.py"),
    (4, "misuse.py"),
    (2, "wrappers.py"),
]
CASES = [
    pytest.param(world, script, case, id=f"{world}-{script.removesuffix('.py')}-{case}")
    for world, script in SCRIPTS
    for case in cases(script)
]


@pytest.mark.parametrize(("world", "script", "case"), CASES)
def test_as_on_one_process(world, script, case):
    found = outcome(world, script)
    assert found.get(case) == dict.fromkeys(range(world)), found.get(case) or found.get("ended")


def test_a_case_that_fails_is_seen():
    found = processes.results(2, "failing.py", timeout=180)
    assert found["good"] == {0: None, 1: None}
    assert "AssertionError" in found["not_on_the_second"][1]
    assert found["ended"][1]


def test_what_does_not_end_is_ended():
    with pytest.raises(TimeoutError, match="not done after 1 s"):
        processes.run(1, "failing.py", "sleep", timeout=1)


@pytest.mark.parametrize(("before", "waiting", "ranks"), [(1, 3, "1, 3"), (2, 0, "0, 1")])
def test_the_others_end_when_one_is_killed(before, waiting, ranks):
    """Killed before the first reduction it leaves 3, its partner in that, waiting; before the second 0."""
    ended = processes.run(4, "killed.py", str(before), timeout=180)
    assert ended[1].status == -signal.SIGKILL
    for rank in {0, 2, 3}:
        told = json.loads(ended[rank].output)
        assert told["state"] == ("as before" if told["error"] else "clipped"), told
    assert f"over the ranks {ranks}: one of them has ended" in json.loads(ended[waiting].output)["error"]
