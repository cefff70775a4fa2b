"""No example makes a mistake that a guard finds: each runs with a guard of each of its optimizers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from test_examples import ARGUMENTS, EXAMPLES, LONG, ON_THIS_MACHINE, PASSED_OVER, PROCESSES

GUARDED = Path(__file__).parent / "support" / "guarded.py"
# Those that train with an optimizer of PyTorch. Private sums bound each example, not the norm at a step.
TRAINING = {path.name for path in EXAMPLES.glob("*.py") if "torch.optim" in path.read_text(encoding="utf-8")}
BOUNDS = {name: "inf" if "private" in name or name.startswith("dp_") else "1.0" for name in sorted(TRAINING)}


def test_these_examples_train():
    assert set(PROCESSES) | {"torch_training.py", "torch_grad_scaler.py", "torch_private.py"} <= TRAINING


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in BOUNDS]
)
def test_a_guard_says_nothing(name):
    started = ["-Werror", *PASSED_OVER]
    if name in PROCESSES:
        started = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES[name])]
    done = subprocess.run(
        [sys.executable, *started, str(GUARDED), BOUNDS[name], str(EXAMPLES / name), *ARGUMENTS.get(name, [])],
        env=os.environ | {"PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"} | ON_THIS_MACHINE,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    looks = re.findall(r"guards looked (\d+) times", done.stdout)
    assert len(looks) == PROCESSES.get(name, 1)
    assert min(map(int, looks)) >= 3
