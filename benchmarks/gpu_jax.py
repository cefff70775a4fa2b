"""Time a jitted `clip_by_global_norm` on a GPU beside optax's; gpu.py starts this, row by row.

There are no events: a call's time is the wall's until its results are there. The host's time is that of the call, which
does not wait. The floor is a jitted sum of as many bytes.
"""

import random
import statistics
import time

import jax
import numpy as np
import optax
from gpu_results import FLOOR, KERNELS, PEER
from gpu_worker import Row, answer, options_of, text_of
from workloads import GPT2_SMALL

from gradclip.integrations.optax import clip_by_global_norm

THRESHOLDS = {"not clipped": 1e9, "clipped": 100.0}
CALL = "jax.jit, clip_by_global_norm"
PLAN = [Row("GPT-2 small", dtype, CALL, case) for dtype in ("float32", "bfloat16") for case in THRESHOLDS]


def jitted(transformation):
    return jax.jit(lambda tree, c: transformation(c).update(tree, optax.EmptyState())[0])


class Jitted:
    """The compiled contenders of one dtype."""

    def __init__(self, dtype, shapes):
        rng = np.random.default_rng(0)
        self.tree = [jax.numpy.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in shapes]
        self.bytes = sum(leaf.nbytes for leaf in self.tree)
        self.read = jax.numpy.ones(self.bytes // 4)
        self.ours, self.theirs = map(jitted, (clip_by_global_norm, optax.clip_by_global_norm))
        self.sum = jax.jit(jax.numpy.sum)

    def contenders(self, max_norm):
        return {
            KERNELS: lambda: self.ours(self.tree, max_norm),
            PEER: lambda: self.theirs(self.tree, max_norm),
            FLOOR: lambda: self.sum(self.read),
        }


def medians(contenders, seconds, least=5, most=100):
    errors, taken = {}, {}
    for name, call in contenders.items():
        try:
            for _ in range(2):
                jax.block_until_ready(call())
            taken[name] = []
        except Exception as error:
            errors[name] = text_of(error)
    end, turns = time.perf_counter() + seconds, 0
    while taken and turns < most and (turns < least or time.perf_counter() < end):
        for name in random.sample(list(taken), len(taken)):
            taken[name].append(seconds_of(contenders[name]))
        turns += 1
    return turns, {name: summary(times) for name, times in taken.items()}, errors


def seconds_of(call):
    start = time.perf_counter()
    result = call()
    host = time.perf_counter() - start
    jax.block_until_ready(result)
    return time.perf_counter() - start, host


def summary(times):
    ready, host = (statistics.median(some) for some in zip(*times, strict=True))
    return {"ms": 1e3 * ready, "host us": 1e6 * host}


class Waiter:
    """What `answer` waits for: JAX reports errors where results are read."""

    def wait(self):
        jax.block_until_ready(jax.numpy.zeros(()) + 1)


def prepare(options):
    random.seed(0)
    shapes = GPT2_SMALL[:10] if options.small else GPT2_SMALL
    shapes = [tuple(-(-n // 32) for n in shape) for shape in shapes] if options.small else shapes
    made = {}

    def measure(row):
        if row.dtype not in made:
            made.clear()
            made[row.dtype] = Jitted(row.dtype, shapes)
        held = made[row.dtype]
        turns, times, errors = medians(held.contenders(THRESHOLDS[row.case]), options.turns)
        found = {"tensors": len(shapes), "bytes": held.bytes, "peer": "optax.clip_by_global_norm", "turns": turns}
        return {**found, "times": times, **({"errors": errors} if errors else {})}

    return Waiter(), {"JAX on": jax.devices()[0].device_kind}, measure


if __name__ == "__main__":
    answer(options_of(__doc__), PLAN, prepare)
