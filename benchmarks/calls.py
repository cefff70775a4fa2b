"""Time small, many and functional calls, compared with the code they replace or a call that should be as fast.

Arrays have 64 float32 elements unless stated otherwise. "plain NumPy" adds squares with `np.vdot` and multiplies each
array. Calls by layer are compared with calls by the global norm, functional calls with in-place calls. The rows named
"ways" compare other ways of passing the same gradients with a plain list (spellings.py).

`--against OTHER_SRC` compares gradclip's own calls with those of another copy of the source, in turns; `--only` selects
workloads. On a busy machine, `--processor` counts the seconds that a process computes, not those that it waits.
"""

import math
import random
import sys
import time
from pathlib import Path

import numpy as np
import spellings
import torch
import turns
from report import CALLS, parser, rows, show, write_measured
from timing import medians
from torch.nn.utils import clip_grad_norm_, get_total_norm

import gradclip
import gradclip.integrations.torch

CASES = {"not clipped": 1e12, "clipped": 1.0}
EACH = 64


def tensors(count, elements=EACH):
    return [torch.randn(elements) for _ in range(count)]


def parameters(grads):
    made = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(made, grads, strict=True):
        parameter.grad = grad.clone()
    return made


def foreach(grads, max_norm):
    norm = get_total_norm(grads, foreach=True)
    return torch._foreach_mul(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0)), norm


def plain_numpy(grads, max_norm):
    norm = np.sqrt(sum(np.vdot(grad, grad) for grad in grads))
    scale = np.float32(min(1.0, max_norm / (norm + 1e-6)))
    return [grad * scale for grad in grads], norm


def in_place(grads, max_norm):
    ours, theirs = parameters(grads), parameters(grads)

    def again(held):
        return lambda: torch._foreach_copy_([p.grad for p in held], grads)

    return {
        "gradclip.clip_grad_norm_": (lambda: gradclip.clip_grad_norm_(ours, max_norm), again(ours)),
        "torch.nn.utils.clip_grad_norm_": (lambda: clip_grad_norm_(theirs, max_norm), again(theirs)),
    }


def beside_torch(name, *given):
    """Compare a function that clips in place, by a norm that is given or by value, with torch's of the same name."""
    ours, theirs = (getattr(library, name) for library in (gradclip.integrations.torch, torch.nn.utils))

    def contenders(grads, bound):
        made = {f"gradclip.{name}": (ours, parameters(grads)), f"torch.nn.utils.{name}": (theirs, parameters(grads))}
        return {
            key: (
                lambda call=call, held=held: call(held, bound, *given),
                lambda held=held: torch._foreach_copy_([p.grad for p in held], grads),
            )
            for key, (call, held) in made.items()
        }

    return contenders


def functional(grads, max_norm):
    return {
        "gradclip.clip_by_global_norm": lambda: gradclip.clip_by_global_norm(grads, max_norm),
        "torch get_total_norm, _foreach_mul": lambda: foreach(grads, max_norm),
    }


def of_numpy(grads, max_norm):
    arrays = [grad.numpy() for grad in grads]
    return {
        "gradclip.clip_by_global_norm": lambda: gradclip.clip_by_global_norm(arrays, max_norm),
        "plain NumPy": lambda: plain_numpy(arrays, max_norm),
    }


def numpy_in_place(grads, max_norm):
    arrays, copies = [grad.numpy() for grad in grads], [grad.numpy().copy() for grad in grads]
    held = parameters(grads)

    def again():
        for copy, array in zip(copies, arrays, strict=True):
            copy[...] = array

    return {
        "gradclip.clip_grad_norm_, NumPy": (lambda: gradclip.clip_grad_norm_(copies, max_norm), again),
        "PyTorch's tensors by gradclip": (
            lambda: gradclip.clip_grad_norm_(held, max_norm),
            lambda: torch._foreach_copy_([p.grad for p in held], grads),
        ),
    }


def norms_by_layer(grads, _):
    return {
        "gradclip.layer_norms": lambda: gradclip.layer_norms(grads),
        "global_norm": lambda: gradclip.global_norm(grads),
    }


def by_layer(grads, max_norm):
    return {
        "gradclip.clip_by_layer_norm": lambda: gradclip.clip_by_layer_norm(grads, max_norm),
        "clip_by_global_norm": lambda: gradclip.clip_by_global_norm(grads, max_norm),
    }


def thresholds_of_layers(grads, max_norm):
    each = [max_norm + number for number in range(len(grads))]
    return {
        "gradclip.clip_by_layer_norm": lambda: gradclip.clip_by_layer_norm(grads, each),
        "clip_by_global_norm": lambda: gradclip.clip_by_global_norm(grads, max_norm),
    }


def beside_in_place(function):
    def contenders(grads, max_norm):
        held = parameters(grads)
        return {
            f"gradclip.{function.__name__}": lambda: function(grads, max_norm),
            "clip_grad_norm_": (
                lambda: gradclip.clip_grad_norm_(held, max_norm),
                lambda: torch._foreach_copy_([p.grad for p in held], grads),
            ),
        }

    return contenders


def unit_norm(x):
    return x.norm(2.0, dim=tuple(range(1, x.ndim)), keepdim=True) if x.ndim > 1 else x.norm(2.0)


def timm_adaptive_clip_grad(parameters, clip_factor, eps=1e-3):
    """Clip like `adaptive_clip_grad` in timm/utils/agc.py, https://github.com/huggingface/pytorch-image-models."""
    for p in parameters:
        max_norm = unit_norm(p.detach()).clamp_(min=eps).mul_(clip_factor)
        grad_norm = unit_norm(p.grad.detach())
        clipped_grad = p.grad.detach() * (max_norm / grad_norm.clamp(min=1e-6))
        p.grad.detach().copy_(torch.where(grad_norm < max_norm, p.grad.detach(), clipped_grad))


def by_unit(grads, clipping):
    """Yield calls on square matrices. Each row is clipped to a thousandth of `clipping` times its parameter's norm."""
    matrices = [grad.view(2 * [math.isqrt(grad.numel())]) for grad in grads]
    ours, theirs = parameters(matrices), parameters(matrices)
    for held in (ours, theirs):
        torch._foreach_copy_([p.data for p in held], [100 * matrix for matrix in reversed(matrices)])

    def again(held):
        return lambda: torch._foreach_copy_([p.grad for p in held], matrices)

    factor = clipping / 1000
    return {
        "gradclip.adaptive_grad_clip_": (lambda: gradclip.adaptive_grad_clip_(ours, factor), again(ours)),
        "timm's formula": (lambda: timm_adaptive_clip_grad(theirs, factor), again(theirs)),
    }


def workloads(most):
    """Yield each call, its arrays and its contenders, for at most `most` arrays."""
    for count in (1, 30, 150, 1_000):
        yield "in place", (count, EACH), in_place
        yield "functional", (count, EACH), functional
        yield "functional, NumPy", (count, EACH), of_numpy
    for count in (1, 10):
        yield "functional", (count, 1_000_000), functional
    yield "in place, NumPy", (1_000, EACH), numpy_in_place
    yield "known norm", (150, EACH), beside_torch("clip_grads_with_norm_", torch.tensor(100.0))
    yield "by value", (150, EACH), beside_torch("clip_grad_value_")
    for name, contenders in (
        ("norms by layer", norms_by_layer),
        ("by layer", by_layer),
        ("by layer, each its threshold", thresholds_of_layers),
    ):
        yield name, (1_000, EACH), contenders
    yield "by unit, adaptive", (120, 4_096), by_unit
    for name, contenders in spellings.WORKLOADS.items():
        yield name, (spellings.COUNT, spellings.ELEMENTS), contenders
    if most > 1_000:
        yield "functional", (100_000, EACH), beside_in_place(gradclip.clip_by_global_norm)
        yield "by layer", (100_000, EACH), beside_in_place(gradclip.clip_by_layer_norm)


def cases(most, only):
    """Yield each workload and case as it is printed, its number of arrays, and a function that returns contenders."""
    for name, (count, elements), contenders in workloads(most):
        for case, max_norm in CASES.items():
            if case == "clipped" and (contenders is norms_by_layer or name in spellings.ONLY_MEASURE):
                continue
            label = f"{name}, {count:,} x {elements:,}"
            if only in f"{label}, {case}":
                yield (label, case), count, lambda c=contenders, n=count, e=elements, m=max_norm: c(tensors(n, e), m)


def options():
    found = parser(__doc__, CALLS, "no more than 1,000 arrays")
    found.add_argument("--only", default="", help="only workloads whose names hold this")
    found.add_argument("--against", type=Path, help="the src folder of another copy, to compare with")
    found.add_argument("--processor", action="store_true", help="count processor time; nothing is written")
    found.add_argument("--answer", action="store_true", help="measure what is asked for on stdin")
    return found.parse_args()


def main():
    asked = options()
    random.seed(0)
    torch.manual_seed(0)
    every = {", ".join(label): made for label, _, made in cases(100_000, "")}
    clock = time.process_time if asked.processor else time.perf_counter
    if asked.answer:
        turns.answer(every, clock)
        return
    chosen = list(cases(1_000 if asked.quick else 100_000, asked.only))
    if asked.against:
        named = [", ".join(label) for label, *_ in chosen]
        script = [__file__, *(["--processor"] if asked.processor else [])]
        turns.compare(script, (sources(), asked.against), named, min(asked.repeats, 15), asked.seconds)
        return
    found = []
    for (label, case), count, made in chosen:
        repeats = asked.repeats if count <= 1_000 else 5
        some = rows({"workload": label, "case": case}, medians(made(), repeats, asked.seconds, clock))
        show(label, some)
        found += some
    results = {"threads": torch.get_num_threads(), "repeats": asked.repeats, "rows": found}
    write_measured(results, asked, part=asked.only or asked.processor)


def sources():
    """Return the folder that this process imports gradclip from."""
    return Path(sys.modules["gradclip"].__file__).parents[1]


if __name__ == "__main__":
    main()
