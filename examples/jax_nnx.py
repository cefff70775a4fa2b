"""Train a Flax NNX network with optax: clip in the chain, and log the norm of every layer outside jit."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import gradclip
from gradclip.integrations.optax import clip_by_global_norm

STEPS = 200
MAX_NORM = 1.0


class Network(nnx.Module):
    """Two layers with a norm between them, from 4 numbers to 1."""

    def __init__(self, rngs):
        self.hidden = nnx.Linear(4, 64, rngs=rngs)
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.out = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.norm(self.hidden(x))))


def loss_of(model, inputs, targets):
    return jnp.mean((model(inputs) - targets) ** 2)


@nnx.jit
def train_step(model, optimizer, inputs, targets):
    loss, grads = nnx.value_and_grad(loss_of)(model, inputs, targets)
    # Return what you want to log as arrays, without waiting for them. The optimizer chain clips.
    norms = {"all": gradclip.global_norm(grads), "layers": gradclip.layer_norms(grads)}
    optimizer.update(model, grads)
    return loss, norms


def main():
    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.chain(clip_by_global_norm(MAX_NORM), optax.adam(1e-2)), wrt=nnx.Param)
    inputs = jax.random.normal(jax.random.key(1), (128, 4))
    targets = inputs[:, :1] * inputs[:, 1:2] + 2.0
    # The monitor keeps the arrays and fetches them later, so a step does not wait for the previous one.
    monitor = gradclip.Monitor(top=3)
    for step in range(1, STEPS + 1):
        loss, norms = train_step(model, optimizer, inputs, targets)
        monitor.record(norms["all"], MAX_NORM, layer_norms=norms["layers"])
        if step in (1, 50, 100, STEPS):
            last = monitor.last
            print(f"step {step:3d}: loss {loss:.4f}, gradient norm {last.norm:.3f}, times {last.coefficient:.3f}")
    print(f"clipped to norm {MAX_NORM:g} in {monitor.num_clipped} of {STEPS} steps")
    print("the largest median norms of layers:")
    for name, norm in monitor.top_layers.items():
        print(f"  {name}: {norm:.3f}")


if __name__ == "__main__":
    main()
