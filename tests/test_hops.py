"""Calls pass through no more files and functions than they may."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Files, functions and calls that a call passes at most. The first five are ordinary calls.
MOST = {
    "clip_grad_norm_, PyTorch, clipped": (12, 34, 35),
    "clip_grad_norm_, PyTorch, not clipped": (12, 33, 33),
    "clip_by_global_norm, NumPy": (9, 25, 28),
    "clip_by_global_norm, PyTorch": (12, 31, 34),
    "per_example_clip, NumPy": (9, 33, 39),
    "clip_in_backward, PyTorch, one gradient": (11, 43, 47),
    "clip_grad_norm_, PyTorch, tensor threshold": (16, 48, 62),
    "clip_grad_norm_, PyTorch, AdaptiveThreshold": (29, 111, 227),
    "clip_grad_norm_, PyTorch, names": (13, 36, 40),
    "clip_grad_norm_, PyTorch, parameter group": (13, 37, 38),
    "clip_grads_with_norm_, PyTorch": (18, 50, 68),
    "clip_grad_value_, PyTorch": (11, 28, 28),
    "clip_grad_layer_norm_, PyTorch": (15, 48, 52),
    "clip_grad_layer_norm_, PyTorch, frozen layer": (15, 51, 55),
    "clip_by_global_norm, NumPy, array threshold": (10, 29, 37),
    "clip_by_global_norm, JAX, traced by jit": (35, 189, 308),
    "per_example_clip, NumPy, mask=": (9, 35, 40),
    "clipped_grad, PyTorch": (29, 175, 375),
}


def figures(text):
    found = re.findall(r"^(.+): (\d+) files, (\d+) functions, (\d+) calls$", text, re.MULTILINE)
    return {name: tuple(map(int, numbers)) for name, *numbers in found}


def test_calls_pass_no_more_than_they_may():
    script = [sys.executable, str(ROOT / "benchmarks" / "hops.py")]
    printed = figures(subprocess.run(script, capture_output=True, text=True, check=True).stdout)
    assert list(printed) == list(MOST)
    for name, counts in printed.items():
        assert all(mine <= most for mine, most in zip(counts, MOST[name], strict=True)), (name, counts)
    assert max(MOST[name][0] for name in list(MOST)[:5]) <= 12
