"""The tests of optimizer modules in declearn's source, with gradclip's modules under declearn's names."""

import os
import subprocess
import sys

import pytest

import published_source

# A second look: tests/parity/test_declearn.py compares the same modules.
pytestmark = pytest.mark.slow

# PyTorch imports Triton if it is there, and the process ends if TensorFlow was imported before it.
PLUGIN = """
import triton
import gradclip.integrations.declearn
from declearn.optimizer import list_optim_modules


def pytest_report_header():
    return [f"{name} of {cls.__module__}" for name, cls in list_optim_modules().items()]
"""


def test_all_tests_of_modules_that_clip_pass(tmp_path):
    source = published_source.unpacked("declearn", "2.9.1", tmp_path)
    (tmp_path / "in_their_place.py").write_text(PLUGIN)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    options = ["-p", "in_their_place", "-p", "no:cacheprovider", "-W", "ignore", "-c", str(tmp_path / "pytest.ini")]
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            *options,
            "--rootdir",
            ".",
            "-k",
            "clipping",
            "test/optimizer/test_modules.py",
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), "."]), "PYTEST_ADDOPTS": ""},
        cwd=source,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-8000:] + finished.stderr
    for name in ("l2-clipping", "l2-global-clipping"):
        assert f"{name} of gradclip.integrations.declearn" in finished.stdout
    # 29 tests of each module, on the vectors of four frameworks.
    assert "58 passed" in finished.stdout
