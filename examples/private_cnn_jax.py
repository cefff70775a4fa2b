"""Train a small convolutional network that may be released, in JAX. Compare it with jax_privacy at equal epsilon.

Every step (Abadi et al. 2016) samples each image with probability RATE by the system's cryptographic generator, clips
what the image adds, adds up, and adds exact discrete noise. What an image adds is its gradient, in units of the
threshold, and three numbers for the log: the loss, whether it was right, and whether its gradient was below the
threshold. All are one vector, so one noise protects them together. Whatever is printed or used between steps is read
from the noisy vector: the log, the threshold, the network. The test images are public.

Learning rate and first threshold are chosen for each library by `--choose`: it trains on 1,152 of the training images
and looks at the other 288, not at the test images.

`python examples/private_cnn_jax.py` takes some minutes; `--seeds 1 --steps 8` some seconds.
"""

import argparse
import functools
import math
import statistics
import time

import jax
import jax.numpy as jnp
import jax_privacy.clipping
import numpy as np
from jax_privacy import batch_selection, noise_addition
from jax_privacy.accounting import accountants, analysis, calibrate
from sklearn.datasets import load_digits

import gradclip

TRAINING = 1440  # of 1,797 images; the others are the test
VALIDATION = 288  # of those for training, if settings are chosen
RATE = 0.25
CHANNELS = 16
DELTA = 1e-4
SETTINGS = {"gradclip": (2.0, 1.0), "jax_privacy": (4.0, 0.5)}  # learning rate and threshold, by --choose
CHOICES = [(rate, norm) for norm in (0.5, 1.0, 2.0) for rate in (2.0, 4.0, 8.0)]
SHARE = 0.1  # the norm of the numbers for the log, where a gradient has norm 1: noise grows by 0.5%


def network(seed):
    first, second, third = jax.random.split(jax.random.key(seed), 3)
    return {
        "first": jax.random.normal(first, (3, 3, 1, CHANNELS)) / 3,
        "first_bias": jnp.zeros(CHANNELS),
        "second": jax.random.normal(second, (3, 3, CHANNELS, CHANNELS)) / (9 * CHANNELS) ** 0.5,
        "second_bias": jnp.zeros(CHANNELS),
        "last": jax.random.normal(third, (4 * CHANNELS, 10)) / (4 * CHANNELS) ** 0.5,
        "last_bias": jnp.zeros(10),
    }


def logits_of(params, images):
    for layer in ("first", "second"):
        images = jax.lax.conv_general_dilated(
            images, params[layer], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        images = jnp.tanh(images + params[f"{layer}_bias"])
    return images.reshape(len(images), -1) @ params["last"] + params["last_bias"]


def loss_of(params, image, label):
    """Return the loss of one image, and its logits."""
    logits = logits_of(params, image[None])[0]
    return -jax.nn.log_softmax(logits)[label], logits


def of_one_image(params, threshold, image, label):
    """Return what one image adds to the sum: its gradient / threshold, and three numbers from -1 to 1 for the log."""
    (loss, logits), gradient = jax.value_and_grad(loss_of, has_aux=True)(params, image, label)
    right, below = logits.argmax() == label, gradclip.global_norm(gradient) <= threshold
    numbers = jnp.stack([jnp.clip(loss / 2 - 1, -1, 1), 2.0 * right - 1, 2.0 * below - 1])
    return {
        "gradient": jax.tree.map(lambda g: g / threshold, gradient),
        "log": numbers * SHARE / 3**0.5,
    }


def updated(params, summed, size):
    return jax.tree.map(lambda p, g: p - size * g, params, summed)


def with_gradclip(images, labels, epsilon, steps, seed, learning_rate, max_norm):
    batches = gradclip.PoissonBatches(len(images), RATE, steps=steps)
    expected = RATE * len(images)
    clipped_sum = gradclip.clipped_fun(
        of_one_image,
        {"gradient": 1.0, "log": SHARE},
        batch_argnums=(2, 3),
        keep_batch_dim=False,
        pad_to=batches.pad_to,
    )
    run = gradclip.PrivateRun(batches, clipped_sum.sensitivity(), epsilon=epsilon, delta=DELTA)
    rule = gradclip.PrivateQuantile(quantile=0.5, learning_rate=0.02, initial=max_norm)
    params, state, compiled = network(seed), rule.init(), jax.jit(clipped_sum)
    times, noise, log = [], [], []
    for rows, mask in batches:
        start = time.process_time()
        threshold = rule.max_norm(state)
        summed = jax.block_until_ready(compiled(params, threshold, images[rows], labels[rows], mask=mask))
        before = time.process_time()
        noisy = run.add_noise(summed)
        noise.append(time.process_time() - before)
        loss, right, below = np.asarray(noisy["log"]) * 3**0.5 / SHARE / expected
        state = rule.observe_fraction(state, (1 + below) / 2)
        params = updated(params, noisy["gradient"], learning_rate * threshold / expected)
        log.append((2 + 2 * loss, (1 + right) / 2, float(threshold)))
        times.append(time.process_time() - start)
    if seed == 0:
        last = np.mean(log[-10:], axis=0)
        print(run)
        print(f"last steps, from noisy sums: loss {last[0]:.2f}, accuracy {last[1]:.0%}, threshold {last[2]:.3f}")
    return params, run.epsilon(), times, noise


@functools.cache
def calibrated(epsilon, steps, size):
    """Return the noise multiplier that jax_privacy calibrates, and the epsilon that it computes for it."""
    of_steps = analysis.DpsgdTrainingAccountant(accountants.PldAccountantConfig())
    multiplier = calibrate.calibrate_noise_multiplier(
        target_epsilon=epsilon,
        accountant=of_steps,
        batch_sizes=int(RATE * size),
        num_updates=steps,
        num_samples=size,
        target_delta=DELTA,
        initial_min_noise=0.5,  # far below that, its accountant takes minutes
        initial_max_noise=4.0,
        tol=1e-3,
    )
    params = analysis.DpParams(noise_multipliers=multiplier, num_samples=size, delta=DELTA, batch_size=int(RATE * size))
    return multiplier, of_steps.compute_epsilon(steps, params)


def with_jax_privacy(images, labels, epsilon, steps, seed, learning_rate, max_norm):
    multiplier, spent = calibrated(epsilon, steps, len(images))
    expected = RATE * len(images)
    most = int(expected + 6 * expected**0.5)
    clipped_sum = jax_privacy.clipping.clipped_grad(
        lambda *args: loss_of(*args)[0], l2_clip_norm=max_norm, batch_argnums=(1, 2), keep_batch_dim=False
    )
    std = clipped_sum.sensitivity() * multiplier

    @jax.jit
    def step(params, key, images, labels, padding):
        summed = clipped_sum(params, images, labels, is_padding_example=padding)
        privatizer = noise_addition.gaussian_privatizer(stddev=std, prng_key=key)
        return updated(params, privatizer.update(summed, privatizer.init(params))[0], learning_rate / expected)

    strategy = batch_selection.CyclicPoissonSampling(sampling_prob=RATE, iterations=steps)
    params, times = network(seed), []
    for index, rows in enumerate(strategy.batch_iterator(len(images), np.random.default_rng(seed))):
        start = time.process_time()
        rows = batch_selection.pad_to_multiple_of(rows, most)
        key = jax.random.fold_in(jax.random.key(seed), index)
        params = jax.block_until_ready(step(params, key, images[rows], labels[rows], rows == -1))
        times.append(time.process_time() - start)
    return params, spent, times, []


LIBRARIES = {"gradclip": with_gradclip, "jax_privacy": with_jax_privacy}


def accuracy_of(params, images, labels):
    return float((logits_of(params, images).argmax(1) == labels).mean())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[3.0, 8.0])
    parser.add_argument("--choose", action="store_true", help="try settings on validation images")
    options = parser.parse_args()
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images, labels = np.float32(digits.images / 16)[order, ..., None], np.int32(digits.target)[order]
    training, test = (images[:TRAINING], labels[:TRAINING]), (images[TRAINING:], labels[TRAINING:])
    if options.choose:
        parts = [tuple(part[:-VALIDATION] for part in training), tuple(part[-VALIDATION:] for part in training)]
        for name, train in LIBRARIES.items():
            choose(name, train, parts)
        return
    size = sum(p.size for p in jax.tree.leaves(network(0)))
    print(f"{size} parameters, {options.steps} steps, {options.seeds} seeds, delta {DELTA:g}")
    for epsilon in options.epsilons:
        accuracies = {}
        for name, train in LIBRARIES.items():
            runs = [train(*training, epsilon, options.steps, seed, *SETTINGS[name]) for seed in range(options.seeds)]
            accuracies[name] = [accuracy_of(run[0], *test) for run in runs]
            report(name, runs, accuracies[name])
        if options.seeds > 1:
            compare(accuracies)


def choose(name, train, data):
    """Print the accuracy on validation images of some settings, and the best of them."""
    found = {}
    for settings in CHOICES:
        runs = [train(*data[0], 3.0, 100, seed, *settings) for seed in (100, 101)]
        found[settings] = statistics.mean(accuracy_of(run[0], *data[1]) for run in runs)
        print(f"{name:11} learning rate {settings[0]:g}, threshold {settings[1]:g}: {found[settings]:.1%}", flush=True)
    best = max(found, key=found.get)
    print(f"{name}: learning rate {best[0]:g} and threshold {best[1]:g} are the best\n")


def report(name, runs, accuracies):
    """Print the means of some runs: epsilon, accuracy on the test, and the processor time of a step."""
    spent = math.ceil(1000 * max(run[1] for run in runs)) / 1000
    each = statistics.median(taken for run in runs for taken in run[2])
    noise = statistics.median(taken for run in runs for taken in run[3] or [0.0])
    of_noise = f", of which exact noise {1000 * noise:.1f}" if noise else ""
    print(
        f"{name:11} epsilon {spent:.3f}, test accuracy {statistics.mean(accuracies):.1%} "
        f"± {spread_of(accuracies):.1%}, {1000 * each:.1f} ms/step{of_noise}"
    )


def spread_of(accuracies):
    """Return the standard deviation, 0 for a single run."""
    return statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0


def compare(accuracies):
    """Say whether gradclip is worse than the other library by more than a standard deviation."""
    (ours, theirs), spread = map(statistics.mean, accuracies.values()), max(map(spread_of, accuracies.values()))
    print(f"gradclip is worse by more than one standard deviation: {'yes' if ours < theirs - spread else 'no'}\n")


if __name__ == "__main__":
    main()
