"""ZeroRedundancyOptimizer of PyTorch clips at its step to the norm of all parameters, shared out among processes."""

from pathlib import Path

import pytest

import processes

WORKER = Path(__file__).with_name("zero_worker.py")


def test_all_weights_move_by_the_clipped_gradient(tmp_path):
    for found in processes.run(WORKER, tmp_path, 2, ["step"]):
        norm, seen, moved = found["step"]
        assert norm > 0.5
        assert seen == pytest.approx(norm, rel=1e-5)
        assert moved == pytest.approx(0.5, rel=1e-4)
