"""One run with many canaries: what it reveals stays below what the run claims, and breaks the claim of wrong loops."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from gradclip import PoissonBatches, PrivateRun, SumLayout, add_noise, clipped_grad
from gradclip._src.private.audit.canaries import audited_epsilon, chance_of_guesses

CANARIES, GUESSES, STEPS, DELTA = 8000, 800, 4, 1e-4


def loss(weights, canary):
    """Its gradient has norm 4: each canary has a weight of its own."""
    return 4.0 * weights[canary].sum()


def audited(seed, *, noise=1.0, clip=True):
    """Train with the canaries that coins choose, and return what the run claims and what it reveals.

    `noise` and `clip` make the loop wrong: noise of that part of what was planned, gradients that are not clipped.
    """
    generator = np.random.default_rng(seed)
    included = generator.random(CANARIES) < 0.5
    data = torch.as_tensor(np.flatnonzero(included))
    batches = PoissonBatches(len(data), 0.9, steps=STEPS, seed=generator)
    clipped = clipped_grad(loss, 1.0, pad_to=batches.pad_to, microbatch_size=256)
    weights, torch_generator = torch.zeros(CANARIES), torch.Generator().manual_seed(seed)
    promised = clipped.sensitivity(layout=SumLayout(elements=weights))
    run = PrivateRun(batches, promised, delta=DELTA, noise_multiplier=4.0, rng=torch_generator)
    released = torch.zeros(CANARIES)
    for indices, mask in batches:
        batch = data[torch.as_tensor(indices)]
        if clip:
            summed = clipped(weights, batch, mask=torch.as_tensor(mask))
        else:
            summed = torch.zeros(CANARIES).index_add(0, batch[torch.as_tensor(mask)], torch.full((mask.sum(),), 4.0))
        if noise == 1.0:
            released += run.add_noise(summed)
        else:
            released += add_noise(summed, promised, noise_multiplier=noise * 4.0, rng=torch_generator)
    return run.epsilon(STEPS), audited_epsilon(released.numpy(), included, guesses=GUESSES, delta=DELTA)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_right_loop_keeps_its_claim(seed):
    claimed, revealed = audited(seed)
    assert 0.3 * claimed < revealed < claimed


@pytest.mark.parametrize("seed", [0, 1])
def test_half_the_noise_is_caught(seed):
    claimed, revealed = audited(seed, noise=0.5)
    assert revealed > claimed


def test_gradients_that_are_not_clipped_are_caught():
    claimed, revealed = audited(0, clip=False)
    assert revealed > 1.5 * claimed


def test_the_same_seed_gives_the_same_audit():
    assert audited(3) == audited(3)


@pytest.mark.parametrize(("canaries", "guesses", "correct"), [(40, 20, 20), (40, 20, 15), (1000, 100, 71), (10, 4, 0)])
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("delta", [0.0, 1e-4])
def test_the_bound_is_that_of_the_theorem(canaries, guesses, correct, epsilon, delta):
    law = stats.binom(guesses, 1 / (1 + math.exp(-epsilon)))
    slopes = [(law.cdf(correct - 1) - law.cdf(correct - 1 - i)) / i for i in range(1, canaries + 1)]
    expected = min(1.0, law.sf(correct - 1) + 2 * canaries * delta * max(slopes))
    assert chance_of_guesses(canaries, guesses, correct, epsilon, delta) == pytest.approx(expected, rel=1e-9)


def test_randomized_response_is_refuted_as_often_as_promised():
    # Each coin is told rightly with probability e / (1 + e): epsilon is 1, and the theorem is tight.
    generator, refuted = np.random.default_rng(0), []
    for _ in range(400):
        included = generator.random(200) < 0.5
        told = included == (generator.random(200) < 1 / (1 + math.exp(-1)))
        scores = told + generator.random(200) * 1e-3
        refuted.append(audited_epsilon(scores, included, guesses=200, delta=0.0) > 1.0)
    # Half of 200 canaries are guessed to be in, so up to 5%: 20 of 400, and with it 13 more at most.
    assert 0 < sum(refuted) <= 33


def test_nothing_is_refuted_by_chance():
    included = np.random.default_rng(0).random(1000) < 0.5
    assert audited_epsilon(np.arange(1000.0) % 7, included, guesses=200, delta=1e-5) == 0.0
    assert audited_epsilon(np.arange(1000.0) % 7, included, guesses=200, delta=0.01) == 0.0


@pytest.mark.parametrize("first_in", [True, False])
@pytest.mark.parametrize("kinds", [1, 2])
def test_the_order_of_canaries_with_equal_scores_says_nothing(first_in, kinds):
    # The coins are sorted, so that the order would reveal all of them. The scores do not depend on the coins.
    included = (np.arange(1000) < 500) == first_in
    assert audited_epsilon(np.arange(1000) % kinds, included, guesses=200, delta=0.0) == 0.0


@pytest.mark.parametrize(
    ("scores", "included", "guesses", "settings", "message"),
    [
        ([1.0, 2.0], [True], 2, {}, r"one number for each canary, got shapes \(2,\) and \(1,\)"),
        ([1.0, math.nan], [True, False], 2, {}, "one number for each canary"),
        ([1.0, 2.0], [1, 0], 2, {}, "included must hold a boolean for each canary, got dtype int64"),
        ([1.0, 2.0], [True, False], 3, {}, "guesses must be an even number of at most 2 canaries, got 3"),
        ([1.0, 2.0], [True, False], 4, {}, "guesses must be an even number of at most 2 canaries, got 4"),
        ([1.0, 2.0], [True, False], 2, {"delta": 1.0}, "confidence and delta must be probabilities"),
        ([1.0, 2.0], [True, False], 2, {"confidence": 1.0}, "confidence and delta must be probabilities"),
    ],
)
def test_errors_say_what_was_expected(scores, included, guesses, settings, message):
    with pytest.raises(ValueError, match=message):
        audited_epsilon(scores, included, guesses=guesses, **{"delta": 1e-5} | settings)
