"""Calls pass through no more files and functions than the page on the architecture says."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def figures(text):
    found = re.findall(r"^(.+): (\d+) files, (\d+) functions, (\d+) calls$", text, re.MULTILINE)
    return {name: tuple(map(int, numbers)) for name, *numbers in found}


def test_calls_pass_no_more_than_it_says():
    script = [sys.executable, str(ROOT / "benchmarks" / "hops.py")]
    printed = figures(subprocess.run(script, capture_output=True, text=True, check=True).stdout)
    said = figures(PAGE)
    assert list(printed) == list(said)
    assert len(said) == 14
    for name, counts in printed.items():
        assert all(mine <= most for mine, most in zip(counts, said[name], strict=True)), (name, counts)
    ordinary = list(said)[:5]
    assert max(said[name][0] for name in ordinary) <= 12
