"""A pytest plugin that prints the processor seconds of test files, with those of the processes they start.

`python -m pytest -p processor_time` prints the files that take most. Wall time, which `--durations` prints, grows with
whatever else the machine does.
"""

import os
from collections import Counter

import pytest

MOST = 30
NAME = "processor seconds"
STARTED = pytest.StashKey[float]()
SECONDS: Counter[str] = Counter()


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
    SECONDS.update({report.nodeid.partition("::")[0]: value for name, value in report.user_properties if name == NAME})


def pytest_terminal_summary(terminalreporter):
    if SECONDS:
        terminalreporter.section(f"{sum(SECONDS.values()):.0f} processor seconds")
        for name, value in SECONDS.most_common(MOST):
            terminalreporter.write_line(f"{value:7.1f}  {name}")
