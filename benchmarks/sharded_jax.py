"""Clip sharded gradients under jit on eight host devices, beside optax: collectives in the compiled text, and time.

Eight devices in one CPU's memory show what is sent, not how fast a network would be.
"""

import os
import re
import statistics
import time

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradclip

LEAVES = 60
SHAPE = (512, 256)
ROUNDS = 15
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
    """Return our call inside of shard_map."""

    def clip(tree):
        return gradclip.clip_by_global_norm(tree, 1.0, axis_name=mesh.axis_names)[0]

    return jax.shard_map(clip, mesh=mesh, in_specs=(specs,), out_specs=specs)


def count(text, operation):
    return len(re.findall(rf" {operation}(?:-start)?\(", text))


def measured(function, tree):
    """Return the all-reduces in the compiled text, those outside of branches, the all-gathers, and milliseconds."""
    compiled = jax.jit(function).lower(tree).compile()
    text = compiled.as_text()
    entry = text[text.index("\nENTRY") :]
    times = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        jax.block_until_ready(compiled(tree))
        times.append(time.perf_counter() - start)
    reductions = f"{count(text, 'all-reduce')} ({count(entry, 'all-reduce')})"
    return f"{reductions} | {count(text, 'all-gather')} | {1e3 * statistics.median(times[1:]):.1f}"


def main():
    print(f"{LEAVES} float32 leaves of shape {SHAPE}, all clipped; {jax.device_count()} host devices")
    print("| layout | mesh | function | all-reduces (outside of branches) | all-gathers | ms |")
    print("|---|---|---|---|---|---|")
    for name, (shape, specs) in LAYOUTS.items():
        specs = [specs[i % len(specs)] for i in range(LEAVES)]
        for kind in (AxisType.Auto, AxisType.Explicit):
            mesh = jax.make_mesh(shape, ("x", "y")[: len(shape)], axis_types=(kind,) * len(shape))
            tree = [jax.device_put(jnp.full(SHAPE, 0.1), NamedSharding(mesh, spec)) for spec in specs]
            calls = {"gradclip": ours, "optax": peer}
            if kind is AxisType.Explicit:
                calls["gradclip in shard_map"] = inside(mesh, specs)
            with jax.set_mesh(mesh):
                for function, call in calls.items():
                    print(f"| {name} | {kind.name} | {function} | {measured(call, tree)} |", flush=True)


if __name__ == "__main__":
    main()
