"""Print the test files of what has changed since this branch left `main`: `changed_tests.py [branch]`.

On `main` itself, only what is not committed counts as changed.
"""

import re
import runpy
import subprocess
import sys
from pathlib import Path

from mirror import kernels, modules, name_of, tests_of

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
ROOM = ROOT / "src" / "gradclip"
# How the code is laid out: a change of any file may break these.
ALWAYS = ("tests/repository/test_layering.py", "tests/repository/test_mirror.py")
# Files and folders whose tests have other names.
SPECIAL = {
    "CHANGELOG.md": ["tests/repository/test_pages.py"],
    "CONTRIBUTING.md": ["tests/repository/test_pages.py"],
    "README.md": ["tests/test_readme.py"],
    "docs": ["tests/test_docs.py", *(f"tests/repository/test_{name}.py" for name in ("architecture", "pages"))],
    "examples": ["tests/test_examples.py"],
    "proofs": [],
    "scripts/changed_tests.py": ["tests/repository/test_changed_tests.py"],
    "scripts/mirror.py": ["tests/repository/test_changed_tests.py"],
    "scripts/structure.py": [],
    "src/gradclip/_src/native": ["tests/native"],
    "tests/conftest.py": ["tests/repository/test_quick.py"],
    "tests/gpu": [],
    "tests/oracle": ["tests/oracle/test_oracle.py"],
    "tests/keras_backends": ["tests/integrations/test_keras.py"],
    "tests/parity/lucid": [],
    "tests/proofs": [],
    "tests/sharded_jax": ["tests/distributed/test_processes_mesh_axes.py"],
    "tests/site": [],
    "tests/trainers": [],
    "zensical.toml": ["tests/repository/test_pages.py", "tests/repository/test_site_pages.py"],
}
MOST = 10
"""Test files that are run where one helper changes; the rest are left to `make test`."""


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def changed(branch="main"):
    """Return the files that differ from where this branch left `branch`, committed or not; none that are gone."""
    try:
        base = git("merge-base", branch, "HEAD").strip()
    except subprocess.CalledProcessError:  # a clone without that branch
        base = "HEAD"
    names = git("diff", "--name-only", base) + git("ls-files", "--others", "--exclude-standard")
    return sorted({name for name in names.splitlines() if (ROOT / name).exists()})


def of_file(name):
    """Return the test files of a changed file. All are paths in the repository."""
    for place, files in SPECIAL.items():
        if name == place or name.startswith(f"{place}/"):
            return files
    path = ROOT / name
    if path.is_relative_to(TESTS) and path.suffix == ".py":
        return [name] if path.match("test_*.py") else of_helper(path)
    return of_module(path) if path.is_relative_to(ROOM) and path.suffix == ".py" else []


def of_module(path):
    """Return the test files of a module, or those that tests/repository/test_mirror.py names where it has none."""
    name = name_of(path, ROOM)
    elsewhere = runpy.run_path(str(TESTS / "repository" / "test_mirror.py"))["TESTED_ELSEWHERE"].get(name, "")
    return [in_repository(file) for file in tests_of(name, TESTS, modules(ROOM) | kernels(ROOM))] or re.findall(
        r"\S+\.py", elsewhere
    )


def of_helper(path):
    """Return the test files that import what several of them share, unless they are too many."""
    pattern = re.compile(rf"^(import|from) .*\b{path.stem}\b", re.MULTILINE)
    found = [in_repository(file) for file in sorted(TESTS.rglob("test_*.py")) if pattern.search(file.read_text())]
    if len(found) > MOST:
        print(f"{in_repository(path)} is used by {len(found)} test files: run `make test`", file=sys.stderr)
    return found if len(found) <= MOST else []


def in_repository(path):
    return str(path.relative_to(ROOT))


def selected(names):
    """Return the test files to run where these files have changed, each once."""
    return sorted({*ALWAYS, *(file for name in names for file in of_file(name))})


if __name__ == "__main__":
    print(*selected(changed(*sys.argv[1:])))
