"""Run `.ci/run` on a clean clone of the last commit, and say in ten lines what failed and how to repeat it.

`python scripts/ci.py [FOLDER]`: the clone is made in that folder, by default in a new one beside other temporary files.
It is deleted if everything passed.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_LINES = 10
FAILED_TEST = re.compile(r"^(?:FAILED|ERROR) (\S+\.py::[^\s\[]+\[.*?\](?= - |$)|\S+\.py\S*)(?: - .*)?$", re.M)
FAILED_PART = re.compile(r"^ *\d+ s  (.+): FAILED$", re.M)
# Tests that have an environment of their own, and the command that runs them.
OTHER_ENVIRONMENTS = {"tests/trainers": "make trainers", "tests/site": "make docs", "tests/parity/lucid": "make lucid"}


def git(*arguments, folder=None):
    return subprocess.run(
        ["git", *arguments], cwd=folder or ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def clone(folder):
    """Clone the last commit into a folder that is empty or new."""
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"{folder} is not empty. Name a new folder, or delete it.")
    git("clone", "--quiet", str(ROOT), str(folder))
    if not (folder / ".ci" / "run").exists():
        sys.exit(f"The last commit of {ROOT} has no .ci/run.")


def run(folder):
    """Run what CI runs, print what it prints, and return its exit status and its output."""
    settings = {name: value for name, value in os.environ.items() if name not in {"VIRTUAL_ENV", "MAKEFLAGS"}}
    command = {
        "args": ["bash", ".ci/run"],
        "cwd": folder,
        "env": settings | {"CI": "true"},
        "stdin": subprocess.DEVNULL,
    }
    output = []
    with subprocess.Popen(
        **command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as started:
        for line in started.stdout:
            print(line, end="", flush=True)
            output.append(line)
    return started.returncode, "".join(output)


def repeat(test):
    """Return the command that runs a failed test again."""
    for folder, command in OTHER_ENVIRONMENTS.items():
        if test.startswith(folder):
            return command
    return f".venv/bin/python -m pytest '{test}'"


def told(status, output):
    """Return what failed and how to repeat it, in few lines."""
    if status == 0:
        return ["Everything passed."]
    parts = [f"failed: {part}" for part in FAILED_PART.findall(output)]
    tests = list(dict.fromkeys(FAILED_TEST.findall(output)))
    room = (MOST_LINES - len(parts) - 1) // 2
    shown = [line for test in tests[:room] for line in (test, f"  {repeat(test)}")]
    more = [f"and {len(tests) - room} more tests"] if len(tests) > room else []
    return [*parts, *shown, *more] or [f".ci/run ended with status {status}"]


def main(folder=None):
    start = time.monotonic()
    folder = Path(folder or tempfile.mkdtemp(prefix="gradclip-ci-")).resolve()
    if git("status", "--porcelain"):
        print("Changes that are not committed are not tested.", flush=True)
    clone(folder)
    status, output = run(folder)
    print(f"\n{git('rev-parse', 'HEAD', folder=folder)}, {(time.monotonic() - start) / 60:.0f} minutes, in {folder}")
    print(*told(status, output), sep="\n")
    if status == 0:
        shutil.rmtree(folder)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
