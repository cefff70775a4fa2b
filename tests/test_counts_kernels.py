"""benchmarks/counts_kernels.py counts what the kernels for GPUs launch, read and write, and what PyTorch does."""

import importlib
from pathlib import Path

import pytest

SHAPES = [(300, 40), (70_001,), (8,)]


@pytest.fixture
def counts(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    for name in ("TRITON_INTERPRET", "GRADCLIP_GPU_KERNELS"):
        monkeypatch.setenv(name, "1")  # the script sets them
    return importlib.import_module("counts_kernels")


@pytest.mark.parametrize("call", ["clip_grad_norm_", "clip_grad_norm_, drop", "clip_grad_layer_norm_"])
def test_one_read_where_nothing_is_clipped(counts, call):
    ours, _ = counts.CALLS[call]
    assert counts.counted(ours, counts.NEVER, SHAPES) == (3, 1.0)
    assert counts.counted(ours, counts.ALWAYS, SHAPES) == (3, 3.0)


def test_pytorch_reads_twice_and_writes(counts):
    operations, moved = counts.counted_peer(counts.torchs, counts.NEVER, SHAPES)
    assert (operations > 3, moved) == (True, 3.0)
