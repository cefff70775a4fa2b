"""Settings of the tests that need trainers. `make trainers` runs them in an environment of their own.

That environment has no JAX and no TensorFlow, so pyproject.toml's settings do not apply here.
"""

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "support"), str(TESTS)]
# No trainer may ask a server for anything.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}

MARKERS = ("after_error: asserts that after an error nothing has changed",)
# Warnings are errors, but for what trainers warn of themselves: of their own code, or of machines without a GPU.
WARNINGS = (
    "error",
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning",
    "ignore:The '.*' does not have many workers:UserWarning",
    "ignore:Checkpoint directory .* exists and is not empty:UserWarning",
    "ignore:The number of training batches .* is smaller than the logging interval:UserWarning",
    "ignore:'click:DeprecationWarning",
    "ignore:.*gradient_checkpointing.* is deprecated:FutureWarning",
    "ignore:There is a performance drop because:UserWarning",
    "ignore:Cannot (locate reference to|pickle) .*MonthDayNano",
)


def pytest_configure(config):
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    for warning in WARNINGS:
        config.addinivalue_line("filterwarnings", warning)
