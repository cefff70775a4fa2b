"""Train with parameters on the devices of two processes, and clip by their global norm.

Without arguments, the script starts both processes itself. On a cluster, start one process per machine:

    python jax_two_processes.py --process-id 0 --processes 2 --coordinator first-machine:1234
"""

import argparse
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradclip

MAX_NORM = 1.0
STEPS = 100


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--process-id", type=int)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--coordinator")
    parser.add_argument("--timeout", type=float, default=100.0, help="seconds until both processes are ended")
    arguments = parser.parse_args()
    if arguments.process_id is None:
        sys.exit(start_all(arguments.processes, arguments.timeout))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(arguments.coordinator, arguments.processes, arguments.process_id)
    train()
    jax.distributed.shutdown()


def start_all(processes, timeout):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        coordinator = f"localhost:{probe.getsockname()[1]}"
    shared = ["--processes", str(processes), "--coordinator", coordinator]
    command = [sys.executable, *(f"-W{option}" for option in sys.warnoptions), __file__, *shared]
    started = [subprocess.Popen([*command, "--process-id", str(i)]) for i in range(processes)]
    try:
        return max(abs(process.wait(timeout)) for process in started)
    finally:
        for process in started:
            process.kill()
            process.wait()


def train():
    mesh = jax.make_mesh((jax.device_count(),), ("model",), axis_types=(AxisType.Auto,))
    layout = {"hidden": P(None, "model"), "bias": P("model"), "out": P("model")}
    split = {name: NamedSharding(mesh, spec) for name, spec in layout.items()}
    rng = np.random.default_rng(0)
    whole = {
        "hidden": rng.standard_normal((4, 16), np.float32),
        "bias": np.zeros(16, np.float32),
        "out": rng.standard_normal(16, np.float32),
    }
    inputs = rng.standard_normal((64, 4), np.float32)
    targets = 10 * inputs[:, 0] * inputs[:, 1]
    params = {name: distributed(whole[name], split[name]) for name in whole}
    expected = gradclip.global_norm(jax.grad(loss)(whole, inputs, targets))

    @jax.jit
    def step(params):
        value, grads = jax.value_and_grad(loss)(params, inputs, targets)
        clipped, norm = gradclip.clip_by_global_norm(grads, MAX_NORM)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, clipped), value, norm

    text = step.lower(params).compile().as_text()
    say(f"{jax.process_count()} processes, {jax.device_count()} devices; whole arrays gathered: {'all-gather' in text}")
    for i in range(1, STEPS + 1):
        params, value, norm = step(params)
        if i == 1:
            say(f"step   1: loss {float(value):8.3f}, norm {float(norm):.4f}, in one process {float(expected):.4f}")
    kept = all(params[name].sharding.is_equivalent_to(split[name], params[name].ndim) for name in params)
    say(f"step {i}: loss {float(value):8.3f}, norm {float(norm):.4f}; parameters still sharded: {kept}")


def loss(params, inputs, targets):
    hidden = jnp.tanh(inputs @ params["hidden"] + params["bias"])
    return jnp.mean((hidden @ params["out"] - targets) ** 2)


def distributed(array, sharding):
    """Return a global array. Each process creates only the parts on its own devices."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def say(text):
    if jax.process_index() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
