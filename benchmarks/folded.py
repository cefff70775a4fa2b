"""Time a fused optimizer's step without clipping, with clipping before it, folded into it, and of the update after it.

The gradients are those of GPT-2 small in float32 on the CPU. Prints one thread's processor time in milliseconds, which
other programs disturb least, and its multiple of the step alone.
"""

import argparse
import math
import time

import torch
from in_place import CASES, parameters_of
from report import FOLDED, keep
from timing import medians
from workloads import GPT2_SMALL

import gradclip
from gradclip import clip_at_step

LARGE = 1e9  # a threshold that clips nothing
OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-6, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-6, fused=True),
}


def contenders(parameters, make, max_norm):
    """Return the steps. Before each, the parameters get the same gradients again."""
    optimizer, of_updates = make(parameters), make(parameters)
    gradclip.clip_update_at_step(of_updates, LARGE if max_norm == LARGE else 0.5)
    grads = [parameter.grad for parameter in parameters]
    saved = [torch.randn_like(grad) for grad in grads]

    def after(clip):
        def step():
            clip(parameters, max_norm)
            optimizer.step()

        return step

    def folded():
        clipping = clip_at_step(optimizer, max_norm, fused=True)
        optimizer.step()
        clipping.remove()

    calls = {
        "step alone": optimizer.step,
        "gradclip.clip_at_step": folded,
        "gradclip.clip_grad_norm_, then step": after(gradclip.clip_grad_norm_),
        "torch.nn.utils.clip_grad_norm_, then step": after(torch.nn.utils.clip_grad_norm_),
        "gradclip.clip_update_at_step": of_updates.step,
    }
    return {name: (call, lambda: torch._foreach_copy_(grads, saved)) for name, call in calls.items()}


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--repeats", type=int, default=15, help="the number of steps of each contender")
    options.add_argument("--write", action="store_true", help="store the figures in benchmarks/results")
    given = options.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    parameters = parameters_of(GPT2_SMALL, torch.float32)
    for parameter in parameters:
        torch.nn.init.normal_(parameter)
    norm = math.sqrt(sum(parameter.numel() for parameter in parameters))
    lines = []
    for name, make in OPTIMIZERS.items():
        for case in CASES:
            max_norm = norm / 2 if case == "clipped" else LARGE
            found = medians(contenders(parameters, make, max_norm), given.repeats, clock=time.thread_time)
            for contender, ms in found.items():
                lines.append([name, case, contender, ms / found["step alone"]])
                print(f"{name:<6} {case:<12} {contender:<42} {ms:8.1f} ms {ms / found['step alone']:6.2f}", flush=True)
    keep(FOLDED, lines, given.write, torch=torch.__version__)


if __name__ == "__main__":
    main()
