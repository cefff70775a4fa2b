"""Private trainings of the page on resuming are killed by the system, go on, and end with the epsilon they were planned
for."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import code_blocks

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "resume-private-run.md"
FILES = {
    found[1]: block.code
    for block in code_blocks.blocks(PAGE.read_text())
    if (found := code_blocks.TITLED.match(block.kind))
}


def started(script, folder):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, script], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, bufsize=1
    )


@pytest.mark.parametrize("script", ["train.py", "train_jax.py"])
def test_a_killed_training_goes_on(tmp_path, script):
    (tmp_path / script).write_text(FILES[script])
    with started(script, tmp_path) as first:
        for line in first.stdout:
            if line == "saved at step 20\n":
                first.send_signal(signal.SIGKILL)
                break
        rest = first.stdout.read()
    assert first.returncode == -signal.SIGKILL
    last = max([20, *map(int, re.findall(r"saved at step (\d+)", rest))])  # it went on until the signal came
    with started(script, tmp_path) as second:
        printed = second.stdout.read()
    assert second.returncode == 0
    # Ten sums may have been released after the last state; they count.
    assert re.findall(r"saved at step (\d+)", printed) == [str(step) for step in range(last + 20, 61, 10)]
    assert printed.endswith("epsilon 3.00, 60 sums\n")
