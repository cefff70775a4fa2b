"""Optimizers of Keras: the tests in `keras_backends`, in a process for each backend, since the import chooses it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "keras_backends"
# Keras' arrays do not know NumPy's `copy` yet.
PASSED_OVER = "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}


@pytest.mark.parametrize("backend", ["jax", "torch", "tensorflow"])
def test_on_backend(backend, pytestconfig):
    environment = os.environ | QUIET | {"KERAS_BACKEND": backend}
    environment.pop("PYTEST_XDIST_WORKER", None)
    options = ["-q", "-n0", "-p", "no:cacheprovider", "--confcutdir", str(FOLDER), "-W", PASSED_OVER]
    options += ["-m", pytestconfig.option.markexpr]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(FOLDER)],
        cwd=FOLDER.parents[1],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    assert " passed" in done.stdout
