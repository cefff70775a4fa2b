"""A pytest plugin that measures tests in processor seconds, with those of the processes they start.

`python -m pytest -p processor_time` prints the files that take most, and writes the slowest tests to
`build/slowest-tests.txt`. With `--write-times` it also writes `tests/times.json`, by which quick.py chooses. Wall time,
which `--durations` prints, grows with whatever else the machine does.
"""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

import quick

MOST = 30
SLOWEST = Path(__file__).parents[2] / "build" / "slowest-tests.txt"
NAME = "processor seconds"
STARTED = pytest.StashKey[float]()
SECONDS: Counter[str] = Counter()


def pytest_addoption(parser):
    parser.addoption("--write-times", action="store_true", help=f"write the slow tests to {quick.TIMES.name}")


def seconds() -> float:
    """Return the processor seconds of this process and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    item.stash[STARTED] = seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Send the seconds with the last report of a test, from the process that ran it to the one that prints."""
    report = yield
    if call.when == "teardown":
        report.user_properties.append((NAME, seconds() - item.stash[STARTED]))
    return report


def pytest_runtest_logreport(report):
    for name, value in report.user_properties:
        if name == NAME:
            SECONDS[report.nodeid] = value


def pytest_terminal_summary(terminalreporter, config):
    if not SECONDS:
        return
    files: Counter[str] = Counter()
    for name, value in SECONDS.items():
        files[name.partition("::")[0]] += value
    terminalreporter.section(f"{sum(files.values()):.0f} processor seconds")
    for line in lines(files):
        terminalreporter.write_line(line)
    SLOWEST.parent.mkdir(exist_ok=True)
    SLOWEST.write_text("\n".join(lines(SECONDS)) + "\n")
    if config.getoption("write_times"):
        quick.TIMES.write_text(json.dumps(listed(SECONDS, quick.times()), indent=0, sort_keys=True) + "\n")


def lines(found: Counter[str]) -> list[str]:
    return [f"{value:7.1f}  {name}" for name, value in found.most_common(MOST)]


def listed(found: dict[str, float], known: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the times of the tests that are not cheap, by file: those of this run, and those known of other files."""
    files = {file: cases for file, cases in known.items() if not any(name.startswith(f"{file}::") for name in found)}
    for name, value in found.items():
        if value >= quick.CHEAP:
            file, _, case = name.partition("::")
            files.setdefault(file, {})[case] = round(value, 1)
    return files
