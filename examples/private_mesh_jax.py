"""Private training on the devices of a mesh: the batch is split, the process draws batches and noise.

With one processor, run it with XLA_FLAGS=--xla_force_host_platform_device_count=8.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradclip


def loss(params, x, y):
    return (x @ params - y) ** 2


def main():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3)).astype("float32")
    wanted = np.array([1.0, -2.0, 0.5], "float32")
    y = x @ wanted

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    # As many places as a multiple of 8 and of the devices: padding moves no row.
    batches = gradclip.PoissonBatches(n=400, rate=0.2, steps=30, pad_to=160)
    clipped_sum = gradclip.clipped_grad(
        loss, max_norm=1.0, batch_argnums=(1, 2), keep_batch_dim=False, pad_to=batches.pad_to
    )
    run = gradclip.PrivateRun(batches, clipped_sum.sensitivity(), noise_multiplier=2.0, delta=1e-4)
    compiled = jax.jit(lambda params, x, y, mask: clipped_sum(params, x, y, mask=mask))

    params = jax.device_put(jnp.zeros(3), whole)
    for rows, mask in batches:
        summed = compiled(params, *jax.device_put((x[rows], y[rows], mask), split))
        noisy = run.add_noise(summed)  # drawn once: all devices get the same
        params = params - 0.5 * noisy / (0.2 * 400)

    copies = [np.asarray(shard.data) for shard in params.addressable_shards]
    print(f"{jax.device_count()} devices, all with the same parameters: {all((c == copies[0]).all() for c in copies)}")
    print(f"error below 0.5: {bool(abs(copies[0] - wanted).max() < 0.5)}; epsilon {run.epsilon():.2f}")


if __name__ == "__main__":
    main()
