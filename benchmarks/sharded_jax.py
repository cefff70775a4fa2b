"""Clip sharded gradients under jit on eight host devices, compared with optax: collectives in the HLO, and time.

Eight devices on one CPU show what is sent, not how fast a network would be.
"""

import argparse
import os
import random
import re
import statistics
import time
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from report import SHARDED_JAX, write

import gradclip

LEAVES = 60
SHAPE = (512, 256)
LAYOUTS = {
    "fsdp, 8": ((8,), [P("x")]),
    "fsdp x tp, 4 x 2": ((4, 2), [P("x", "y"), P("y", "x")]),
    "fsdp x tp, some replicated": ((4, 2), [P("x", "y"), P("x"), P(None, "y"), P()]),
    "replicated, 8": ((8,), [P()]),
}


def ours(tree):
    return gradclip.clip_by_global_norm(tree, 1.0)[0]


def peer(tree):
    return optax.clip_by_global_norm(1.0).update(tree, optax.EmptyState())[0]


def inside(mesh, specs):
    """Return a gradclip call inside shard_map."""

    def clip(tree):
        return gradclip.clip_by_global_norm(tree, 1.0, axis_name=mesh.axis_names)[0]

    return jax.shard_map(clip, mesh=mesh, in_specs=(specs,), out_specs=specs)


def count(text, operation):
    return len(re.findall(rf" {operation}(?:-start)?\(", text))


def measured(calls, tree, rounds):
    """Yield, for each call, the all-reduces and all-gathers in its compiled text, and its time."""
    compiled = {name: jax.jit(call).lower(tree).compile() for name, call in calls.items()}
    times = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name in random.Random(turn).sample(list(calls), len(calls)):
            start = time.perf_counter()
            jax.block_until_ready(compiled[name](tree))
            times[name].append(time.perf_counter() - start)
    for name, taken in times.items():
        text = compiled[name].as_text()
        reductions, entered = (count(some, "all-reduce") for some in (text, text[text.index("\nENTRY") :]))
        row = {"name": name, "all-reduces": reductions, "outside of branches": entered}
        yield row | {"all-gathers": count(text, "all-gather"), "ms": 1e3 * statistics.median(taken[1:])}


def rows(rounds):
    for layout, (shape, specs) in LAYOUTS.items():
        specs = [specs[i % len(specs)] for i in range(LEAVES)]
        for kind in (AxisType.Auto, AxisType.Explicit):
            mesh = jax.make_mesh(shape, ("x", "y")[: len(shape)], axis_types=(kind,) * len(shape))
            tree = [jax.device_put(jnp.full(SHAPE, 0.1), NamedSharding(mesh, spec)) for spec in specs]
            calls = {"gradclip": ours, "optax": peer}
            if kind is AxisType.Explicit:
                calls["gradclip in shard_map"] = inside(mesh, specs)
            with jax.set_mesh(mesh):
                for row in measured(calls, tree, rounds):
                    described = {"layout": layout, "mesh": kind.name, **row}
                    print(*(f"{value:.1f}" if key == "ms" else value for key, value in described.items()), sep=" | ")
                    yield described


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30, help="the number of calls of each contender")
    parser.add_argument("--out", type=Path, default=SHARDED_JAX, help="the file to write")
    options = parser.parse_args()
    print(f"{LEAVES} float32 leaves of shape {SHAPE}, all clipped; {jax.device_count()} host devices")
    print("layout | mesh | function | all-reduces | those outside of branches | all-gathers | ms")
    write({"rows": list(rows(options.repeats))}, options.out)


if __name__ == "__main__":
    main()
