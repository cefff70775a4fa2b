"""Train privately with JAX and compare with jax_privacy. gradclip clips, dp-accounting computes epsilon.

DP-SGD (Abadi et al. 2016): each step samples every example with probability RATE, clips its gradient, adds the clipped
gradients, and adds noise proportional to the sensitivity of the sum. Batches are padded to one size. The step is
therefore compiled once, and an extra example does not change the last bits of other gradients. Padding is masked out
exactly. Examples go to random rows: adding or removing one does not change how the others are distributed. The printed
plan says how the gradient of each parameter is measured: of the large ones none is made. JAX's random numbers are not
cryptographically secure: learn from this script, but do not release models trained with it.
`private_cnn_jax.py` trains one that may be released.
"""

import argparse
import statistics
import time

import dp_accounting
import jax
import jax.numpy as jnp
import jax_privacy.clipping
import numpy as np
from jax_privacy import noise_addition
from sklearn.datasets import load_digits

import gradclip

MAX_NORM = 1.0
NOISE_MULTIPLIER = 2.0
RATE = 0.1
LEARNING_RATE = 1.0
DELTA = 1e-4
WIDTH = 256
EXAMPLES = 1500
EXPECTED = RATE * EXAMPLES
# Six standard deviations above the expected size. About one batch in a billion is larger.
LARGEST = int(EXPECTED + 6 * EXPECTED**0.5)


def logits_of(params, features):
    return jnp.tanh(features @ params["w"] + params["b"]) @ params["v"] + params["c"]


def loss_of(params, features, labels):
    """Return the loss of one example, or the mean loss of a batch."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits_of(params, features)), labels[..., None], axis=-1)
    return -chosen.mean()


def updated(params, summed):
    return jax.tree.map(lambda p, g: p - LEARNING_RATE * g / EXPECTED, params, summed)


def gradclip_step():
    clipped_grad = gradclip.clipped_grad(loss_of, MAX_NORM, batch_argnums=(1, 2), keep_batch_dim=False, pad_to=LARGEST)
    print(clipped_grad.plan(network(), jnp.zeros((LARGEST, 64)), jnp.zeros(LARGEST, int)))
    sensitivity = clipped_grad.sensitivity("add_or_remove_one")
    noise_std = sensitivity.noise_std(NOISE_MULTIPLIER)
    print(f"gradclip: {sensitivity}; noise {noise_std:.7f}")

    @jax.jit
    def step(params, key, features, labels, mask):
        leaves, structure = jax.tree.flatten(clipped_grad(params, features, labels, mask=mask))
        keys = jax.random.split(key, len(leaves))
        noisy = [x + noise_std * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
        return updated(params, jax.tree.unflatten(structure, noisy))

    return step


def jax_privacy_step():
    clipped_grad = jax_privacy.clipping.clipped_grad(
        loss_of, l2_clip_norm=MAX_NORM, batch_argnums=(1, 2), keep_batch_dim=False
    )
    noise_std = clipped_grad.sensitivity() * NOISE_MULTIPLIER

    @jax.jit
    def step(params, key, features, labels, mask):
        summed = clipped_grad(params, features, labels, is_padding_example=~mask)
        privatizer = noise_addition.gaussian_privatizer(stddev=noise_std, prng_key=key)
        return updated(params, privatizer.update(summed, privatizer.init(params))[0])

    return step


def plain_step():
    @jax.jit
    def step(params, key, features, labels, mask):
        def loss_sum(params):
            return jnp.where(mask, jax.vmap(loss_of, in_axes=(None, 0, 0))(params, features, labels), 0.0).sum()

        return updated(params, jax.grad(loss_sum)(params))

    return step


def epsilon(steps):
    """Return the epsilon of all steps together, for adding or removing one example."""
    accountant = dp_accounting.rdp.RdpAccountant(orders=[1 + k / 4 for k in range(4, 100)])
    step = dp_accounting.PoissonSampledDpEvent(RATE, dp_accounting.GaussianDpEvent(NOISE_MULTIPLIER))
    accountant.compose(step, steps)
    return accountant.get_epsilon(DELTA)


def sampled(rng, features, labels):
    """Return a random batch in random order, padded to the largest size, and a mask of the rows that are examples."""
    chosen = np.flatnonzero(rng.random(EXAMPLES) < RATE)
    if len(chosen) > LARGEST:
        raise RuntimeError(f"a batch of {len(chosen)} examples does not fit into {LARGEST}: start again.")
    places = rng.permutation(LARGEST)
    rows = np.pad(chosen, (0, LARGEST - len(chosen)))[places]
    return features[rows], labels[rows], places < len(chosen)


def network():
    for_w, for_v = jax.random.split(jax.random.key(0))
    return {
        "w": jax.random.normal(for_w, (64, WIDTH)) / 8.0,
        "b": jnp.zeros(WIDTH),
        "v": jax.random.normal(for_v, (WIDTH, 10)) / WIDTH**0.5,
        "c": jnp.zeros(10),
    }


def train(makers, steps, features, labels):
    """Train a network with each kind of step on the same batches. Return the networks and median times in seconds."""
    takers = [make() for make in makers]
    params, times = [network() for _ in takers], [[] for _ in takers]
    rng, key = np.random.default_rng(1), jax.random.key(1)
    for _ in range(steps):
        batch = jax.device_put(sampled(rng, features, labels))
        key, for_noise = jax.random.split(key)
        for index, step in enumerate(takers):
            start = time.perf_counter()
            params[index] = jax.block_until_ready(step(params[index], for_noise, *batch))
            times[index].append(time.perf_counter() - start)
    return params, [statistics.median(taken) for taken in times]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    digits = load_digits()
    features, labels = np.float32(digits.data / 16), np.int32(digits.target)
    makers = {"gradclip": gradclip_step, "jax_privacy": jax_privacy_step, "not private": plain_step}
    networks, seconds = train(makers.values(), steps, features[:EXAMPLES], labels[:EXAMPLES])
    print(f"{steps} steps, delta {DELTA:g}, noise multiplier {NOISE_MULTIPLIER:g}")
    print(f"{'':12} {'epsilon':>8} {'accuracy':>9} {'ms/step':>8}")
    for name, params, each in zip(makers, networks, seconds, strict=True):
        spent = float("inf") if name == "not private" else epsilon(steps)
        right = (logits_of(params, features[EXAMPLES:]).argmax(1) == labels[EXAMPLES:]).mean()
        print(f"{name:12} {spent:8.2f} {right:9.1%} {1000 * each:8.2f}")


if __name__ == "__main__":
    main()
