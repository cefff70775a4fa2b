"""The tests that need eight devices, in a process where JAX has them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "sharded_jax"
FILES = sorted(map(str, FOLDER.glob("test_*.py")))
# XLA ends a process whose eight threads do not meet within 40 seconds, which may happen where few processors are free.
FLAGS = [
    "--xla_force_host_platform_device_count=8",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
]


@pytest.mark.parametrize("files", [FILES[start::4] for start in range(4)], ids="abcd")
def test_on_eight_devices(files, pytestconfig):
    environment = os.environ | {"XLA_FLAGS": " ".join(FLAGS), "JAX_PLATFORMS": "cpu"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    options = ["-q", "-p", "no:cacheprovider", "--confcutdir", str(FOLDER), "-m", pytestconfig.option.markexpr]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=FOLDER.parents[1],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    assert " passed" in done.stdout
