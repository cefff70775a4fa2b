"""Clip each per-example gradient by its own norm, then add them: the first half of private training with JAX.

Each example adds at most max_norm to the sum, whatever its values. Private training scales its noise to that bound.
This script adds NO noise, so its results are not private. `info.num_clipped` and `info.norms` reveal single examples.
"""

import jax
import jax.numpy as jnp

import gradclip

MAX_NORM = 1.0


def loss_of(params, features, label):
    logit = features @ params["w"] + params["b"]
    return jnp.logaddexp(0.0, logit) - label * logit


@jax.jit
def clipped_sum(params, features, labels, mask):
    # One gradient per example. Axis 0 of every leaf is the batch.
    grads = jax.vmap(jax.grad(loss_of), in_axes=(None, 0, 0))(params, features, labels)
    # Masked rows add exactly zero. So does an example with NaN, because the default is nonfinite="drop".
    return gradclip.per_example_clip(grads, MAX_NORM, mask=mask)


def main():
    for_features, for_labels = jax.random.split(jax.random.key(0))
    params = {"w": jnp.zeros(5), "b": jnp.zeros(())}
    features = 0.8 * jax.random.normal(for_features, (8, 5))
    labels = jax.random.bernoulli(for_labels, shape=(8,)).astype(jnp.float32)

    # A batch of fixed size: six examples, of which number 3 is broken, and two rows of padding.
    is_example = jnp.arange(8) < 6
    features = features.at[3, 0].set(jnp.nan).at[6:].set(jnp.inf)
    summed, info = clipped_sum(params, features, labels, is_example)
    print("gradient norm of each example:", " ".join(f"{norm:.2f}" for norm in info.norms))
    print(f"{info.num_clipped} of {is_example.sum()} examples had a norm above max_norm {MAX_NORM:g}")
    print("clipped sum w:", " ".join(f"{x:.4f}" for x in summed["w"]), f"b: {summed['b']:.4f}")

    # The same batch, with those three rows replaced by zeros and masked out.
    without = is_example.at[3].set(False)
    expected, _ = clipped_sum(params, jnp.where(without[:, None], features, 0.0), labels, without)
    same = all(jnp.array_equal(summed[name], expected[name]) for name in summed)
    print(f"equal to the sum without the NaN example and the padding, bit for bit: {'yes' if same else 'NO'}")
    print("No noise has been added: this sum is bounded in each example, not private.")


if __name__ == "__main__":
    main()
