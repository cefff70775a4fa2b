"""Tests mirror `src/gradclip/_src`: those of `a/b.py` are `tests/a/test_b.py`, and `test_b_topic.py` beside it.

Those of a folder's `__init__.py` are `tests/a/test_init.py`.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mirror import kernels, module_of, modules

TESTS = Path(__file__).parents[1]
ROOM = TESTS.parent / "src" / "gradclip"

# Modules without a test file of their own, and why.
TESTED_ELSEWHERE = {
    "__main__": "one call of cli.app, which tests/cli/test_app.py makes",
    "backends/framework": "what frameworks supply; tests/backends/test_registry.py has one that supplies the least",
    "backends/jax/framework": "the front of a folder, which tests/backends/test_on_host.py goes through",
    "core/protocols": "nothing that runs; mypy checks it",
    "core/values": "nothing that runs; mypy checks it",
    "backends/torch/distributed": "shards of processes, which tests/distributed/test_process_groups.py starts",
    "integrations/flower": "needs Flower: tests/trainers/test_flower.py",
    "integrations/flower_checked": "needs Flower: tests/trainers/test_flower_checked.py",
    "integrations/flower_replies": "needs Flower: tests/trainers/test_flower_replies.py",
    "integrations/flower_strategies": "needs Flower: tests/trainers/test_flower_strategies.py",
    "integrations/lightning": "needs Lightning, by which tests/trainers/test_lightning.py trains",
    "private/batching/masks": "needs transformers: tests/trainers/test_private_transformers.py",
    "private/noise/jax": "what programs call: tests/private/noise/test_add_programs.py and tests/sharded_jax",
    "private/noise/torch": "what programs call: tests/private/noise/test_add_programs.py; shards of processes, which "
    "tests/distributed/test_process_groups.py starts",
    "integrations/transformers": "needs transformers, by which tests/trainers/test_transformers.py trains",
}
# Tests of programs beside the library, and of what pages and examples do.
OF_PROGRAMS = {
    "arguments",
    "counts_kernels",
    "docs",
    "examples",
    "gallery",
    "digits_network",
    "gpu_benchmark",
    "hops",
    "kinds_picture",
    "readme",
    "scenarios",
    "surface",
    "training",
}
# Folders of tests that mirror nothing: helpers, and tests of a kind of their own.
OTHER_FOLDERS = {
    "attack",
    "exact",
    "gpu",
    "keras_backends",
    "oracle",
    "parity",
    "proofs",
    "repository",
    "sharded_jax",
    "site",
    "support",
    "trainers",
}


def files_in(tests):
    """Return the paths of test files in the folders that mirror the source."""
    files = (path.relative_to(tests) for path in tests.rglob("test_*.py"))
    return sorted(file for file in files if file.parts[0] not in OTHER_FOLDERS)


def without_module(tests, names):
    """Return the test files that name no module."""
    return [str(file) for file in files_in(tests) if module_of(file, names) is None]


def without_test(tests, names):
    return names - {module_of(file, names) for file in files_in(tests)}


def test_every_module_has_its_test_file():
    assert without_test(TESTS, modules(ROOM)) == set(TESTED_ELSEWHERE)


def test_every_test_file_names_a_module():
    names = modules(ROOM) | kernels(ROOM) | OF_PROGRAMS
    assert without_module(TESTS, names) == []


@pytest.mark.parametrize("reason", TESTED_ELSEWHERE.values())
def test_files_that_reasons_name_are_there(reason):
    for name in re.findall(r"\S+\.py", reason):
        assert (TESTS.parent / name).exists()


def test_files_are_told_from_each_other(tmp_path):
    room, tests = tmp_path / "src", tmp_path / "tests"
    for name in ("a/__init__.py", "a/clip.py", "a/clip_each.py", "norms.py"):
        (room / name).parent.mkdir(parents=True, exist_ok=True)
        (room / name).write_text('"""Words."""\n')
    assert modules(room) == {"a/clip", "a/clip_each", "norms"}
    (tests / "a").mkdir(parents=True)
    (tests / "a" / "test_clip_each_topic.py").touch()
    (tests / "test_norm.py").touch()
    assert without_test(tests, modules(room)) == {"a/clip", "norms"}
    assert without_module(tests, modules(room)) == ["test_norm.py"]


def test_tests_of_the_repository_need_no_framework():
    missing = "import sys; sys.modules.update(dict.fromkeys(('jax', 'keras', 'tensorflow', 'torch')))"
    collect = (
        "import pytest; sys.exit(pytest.main(['--collect-only', '-q', '-p', 'no:cacheprovider', 'tests/repository']))"
    )
    command = [sys.executable, "-c", f"{missing}; {collect}"]
    found = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
