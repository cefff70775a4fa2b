"""Count the gradclip files, functions and function calls that one call passes through: `python hops.py`."""

import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch

import gradclip
from gradclip.integrations.torch import clip_grads_with_norm_, clip_in_backward

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


def parameters(count=4, frozen=0):
    """Return parameters with gradients, and some without."""
    made = [torch.nn.Parameter(torch.zeros(3)) for _ in range(count + frozen)]
    for parameter in made[frozen:]:
        parameter.grad = torch.ones(3)
    return made


def ordinary():
    """Return the ordinary calls to count, by name."""
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


def unusual():
    """Return calls with one unusual argument each, and calls that do more, by name."""
    many, frozen, batch = parameters(), parameters(frozen=1), np.ones((5, 3))
    summed = gradclip.clipped_grad(lambda w, x: (w * x).sum(), 1.0)
    weights, examples = torch.ones(3), torch.ones(5, 3)
    max_norm, monitor, mask = gradclip.AdaptiveThreshold(), gradclip.Monitor(), [True] * 4 + [False]
    arrays, traced = {"w": np.ones(3), "b": np.ones(2)}, {"w": jnp.ones(3), "b": jnp.ones(2)}
    scalar, bound, named = torch.tensor(1.0), np.array(1.0), [(f"layer{i}", one) for i, one in enumerate(many)]

    def trace():
        # A new function each time, so that JAX keeps nothing.
        return jax.jit(lambda tree: gradclip.clip_by_global_norm(tree, 1.0)).trace(traced)

    hooked = torch.nn.Parameter(torch.ones(3))
    clip_in_backward([hooked], 1.0)

    return {
        "clip_in_backward, PyTorch, one gradient": lambda: hooked.sum().backward(),
        "clip_grad_norm_, PyTorch, tensor threshold": lambda: gradclip.clip_grad_norm_(many, scalar),
        "clip_grad_norm_, PyTorch, AdaptiveThreshold": lambda: gradclip.clip_grad_norm_(
            many, max_norm, monitor=monitor
        ),
        "clip_grad_norm_, PyTorch, names": lambda: gradclip.clip_grad_norm_(named, 1.0),
        "clip_grad_norm_, PyTorch, parameter group": lambda: gradclip.clip_grad_norm_([{"params": many}], 1.0),
        "clip_grads_with_norm_, PyTorch": lambda: clip_grads_with_norm_(many, 1.0, scalar),
        "clip_grad_value_, PyTorch": lambda: gradclip.clip_grad_value_(many, 1.0),
        "clip_grad_layer_norm_, PyTorch": lambda: gradclip.clip_grad_layer_norm_(many, 1.0),
        "clip_grad_layer_norm_, PyTorch, frozen layer": lambda: gradclip.clip_grad_layer_norm_(frozen, 1.0),
        "clip_by_global_norm, NumPy, array threshold": lambda: gradclip.clip_by_global_norm(arrays, bound),
        "clip_by_global_norm, JAX, traced by jit": trace,
        "per_example_clip, NumPy, mask=": lambda: gradclip.per_example_clip(batch, 1.0, mask=mask),
        "clipped_grad, PyTorch": lambda: summed(weights, examples),
    }


def main():
    for name, call in (ordinary() | unusual()).items():
        files, functions, total, passed = hops(call)
        print(f"{name}: {files} files, {functions} functions, {total} calls")
        if "-v" in sys.argv:
            for (file, line), n in passed.items():
                print("   ", Path(file).relative_to(SOURCES), line, n)


if __name__ == "__main__":
    main()
