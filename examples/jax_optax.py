"""Train with optax: clip first in the chain, before the optimizer sees the gradients."""

import jax
import jax.numpy as jnp
import optax

import gradclip
from gradclip.integrations.optax import clip_by_global_norm

STEPS = 200
MAX_NORM = 1.0


def loss_of(params, inputs, targets):
    hidden = jnp.tanh(inputs @ params["hidden"]["w"] + params["hidden"]["b"])
    return jnp.mean((hidden @ params["out"]["w"] + params["out"]["b"] - targets) ** 2)


def main():
    optimizer = optax.chain(clip_by_global_norm(MAX_NORM), optax.adam(1e-2))

    @jax.jit
    def train_step(params, state, inputs, targets):
        loss, grads = jax.value_and_grad(loss_of)(params, inputs, targets)
        updates, state = optimizer.update(grads, state, params)
        # Only for the report. The chain does not need it.
        norm = gradclip.global_norm(grads)
        return optax.apply_updates(params, updates), state, loss, norm

    for_hidden, for_out, for_inputs = jax.random.split(jax.random.key(0), 3)
    params = {
        "hidden": {"w": 0.3 * jax.random.normal(for_hidden, (4, 32)), "b": jnp.zeros(32)},
        "out": {"w": 0.3 * jax.random.normal(for_out, (32, 1)), "b": jnp.zeros(1)},
    }
    inputs = jax.random.normal(for_inputs, (128, 4))
    targets = jnp.prod(inputs[:, :2], axis=1, keepdims=True) + 2.0
    state = optimizer.init(params)
    clipped = 0
    for step in range(1, STEPS + 1):
        params, state, loss, norm = train_step(params, state, inputs, targets)
        clipped += int(norm > MAX_NORM)
        if step in (1, 50, 100, STEPS):
            print(f"step {step:3d}: loss {loss:.4f}, gradient norm {norm:.3f} before clipping")
    print(f"clipped to norm {MAX_NORM:g} in {clipped} of {STEPS} steps")


if __name__ == "__main__":
    main()
