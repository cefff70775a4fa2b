"""Private trainings of the page on resuming are killed by the system, go on, and end with the epsilon they were planned
for."""

import os
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


KILL = "    run.releases == 27 and os.kill(os.getpid(), 9)\n"


def ran(code, folder):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    (folder / "program.py").write_text(code)
    return subprocess.run([sys.executable, "program.py"], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("program", ["train.py", "train_jax.py"])
def test_a_killed_training_goes_on(tmp_path, program):
    before, line, after = FILES[program].partition("    params = params - noisy / 100\n")
    killed = ran(before + KILL + line + after, tmp_path)
    assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, "saved at step 10\nsaved at step 20\n"), (
        killed.stderr
    )
    resumed = ran(FILES[program], tmp_path)
    # Ten sums may have been released after the last state; they count.
    wanted = ["saved at step 40", "saved at step 50", "saved at step 60", "epsilon 3.00, 60 sums"]
    assert resumed.stdout.splitlines() == wanted, resumed.stderr
