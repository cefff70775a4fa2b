"""Count the gradclip files, functions and function calls that one call passes through: `python hops.py`."""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch

import gradclip

SOURCES = str(Path(gradclip.__file__).parent)


def hops(call):
    """Return the numbers of files, functions and calls of gradclip's Python code in one call, after a warm-up call."""
    call()
    passed = Counter()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(SOURCES):
            passed[frame.f_code.co_filename, frame.f_code.co_firstlineno] += 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len({file for file, _ in passed}), len(passed), passed.total(), passed


def parameters(count=4):
    made = [torch.nn.Parameter(torch.zeros(3)) for _ in range(count)]
    for parameter in made:
        parameter.grad = torch.ones(3)
    return made


def calls():
    """Return the calls to count, by name."""
    many, arrays = parameters(), {"w": np.ones(3), "b": np.ones(2)}
    batch = {"w": np.ones((5, 3)), "b": np.ones((5, 2))}
    tensors = [p.grad.clone() for p in many]
    return {
        "clip_grad_norm_, PyTorch, clipped": lambda: (
            [p.grad.fill_(1.0) for p in many],
            gradclip.clip_grad_norm_(many, 1.0),
        ),
        "clip_grad_norm_, PyTorch, not clipped": lambda: gradclip.clip_grad_norm_(many, 100.0),
        "clip_by_global_norm, NumPy": lambda: gradclip.clip_by_global_norm(arrays, 1.0),
        "clip_by_global_norm, PyTorch": lambda: gradclip.clip_by_global_norm(tensors, 1.0),
        "per_example_clip, NumPy": lambda: gradclip.per_example_clip(batch, 1.0),
    }


if __name__ == "__main__":
    for name, call in calls().items():
        files, functions, total, passed = hops(call)
        print(f"{name}: {files} files, {functions} functions, {total} calls")
        if "-v" in sys.argv:
            for (file, line), n in passed.items():
                print("   ", Path(file).relative_to(SOURCES), line, n)
