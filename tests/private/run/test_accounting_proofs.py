"""The two proofs of `gradclip._src.private.run.accounting`, checked by sums over all outcomes in small cases."""

import math
from itertools import combinations

import mpmath
import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from scipy import stats

from gradclip._src.private.run import accounting
from gradclip._src.private.run.accounting import epsilon, multiplier_on_integers


def remainder(t):
    """Return r of the proof."""
    return 2 * mpmath.nsum(lambda j: mpmath.exp(-2 * mpmath.pi**2 * mpmath.mpf(t) ** 2 * j**2), [1, mpmath.inf])


def gaussian_sum(t, x=0):
    """Return the sum of exp(-(k - x)**2 / (2 t**2)) over the integers."""
    return mpmath.fsum(mpmath.exp(-((k - x) ** 2) / (2 * mpmath.mpf(t) ** 2)) for k in range(-25, 26))


def smoothed(y, s, t):
    """Return the probability of y, if X = N(0, s**2 - t**2) and y is then drawn near X. The trapezoidal rule is exact
    to far more digits than are compared: the integrand is analytic."""
    std, step = mpmath.sqrt(mpmath.mpf(s) ** 2 - mpmath.mpf(t) ** 2), mpmath.mpf(1) / 8
    points = [step * i for i in range(-8 * 30, 8 * 30 + 1)]
    return step * mpmath.fsum(
        mpmath.npdf(x, 0, std) * mpmath.exp(-((y - x) ** 2) / (2 * mpmath.mpf(t) ** 2)) / gaussian_sum(t, x)
        for x in points
    )


@pytest.mark.parametrize("t", [0.5, 1.0])
def test_sums_of_gaussians_are_as_near_to_integrals_as_the_proof_says(t):
    with mpmath.workdps(40):
        whole, r = t * mpmath.sqrt(2 * mpmath.pi), remainder(t)
        near = [gaussian_sum(t, mpmath.mpf(x) / 16) / whole - 1 for x in range(17)]
        assert max(near) == near[0]
        assert abs(near[0] - r) < mpmath.mpf(10) ** -35
        assert -r <= min(near) < -0.97 * r


def test_the_remainder_is_as_small_as_the_proof_says():
    with mpmath.workdps(200):
        r = remainder(4)
        assert r < mpmath.mpf(10) ** -136
        assert 2 * mpmath.mpf(2) ** 126 * mpmath.log((1 + r) / (1 - r)) < min(
            mpmath.mpf(10) ** -97, mpmath.mpf(2) ** -200
        )


@pytest.mark.parametrize(("s", "t"), [(2, 0.5), (1.5, 1)])
def test_the_discrete_gaussian_is_a_gaussian_processed_afterwards(s, t):
    with mpmath.workdps(20):
        r, whole = remainder(t), gaussian_sum(s)
        h = mpmath.log((1 + r) / (1 - r))
        ratios = [
            mpmath.log(mpmath.exp(-(mpmath.mpf(y) ** 2) / (2 * mpmath.mpf(s) ** 2)) / whole / smoothed(y, s, t))
            for y in (0, 1, 4)
        ]
        assert max(map(abs, ratios)) <= h
        # With a wrong variance of X the ratios would be far outside.
        assert max(map(abs, ratios)) < 0.1


def discrete(s, mean, size):
    """Return the probabilities of mean + discrete Gaussian noise at the integers from -size to size."""
    k = np.arange(-size, size + 1)
    weights = np.exp(-((k - mean) ** 2) / (2 * s**2))
    return weights / weights.sum()


def hockey_stick(p, q, eps):
    return np.maximum(p - math.exp(eps) * q, 0).sum()


def spent(p, q, eps):
    """Return delta at epsilon between two laws, in the worse direction."""
    return max(hockey_stick(p, q, eps), hockey_stick(q, p, eps))


def test_vectors_of_integers_keep_the_epsilon():
    # A sum of two integers moves by (24, 32), so by 40 steps; the noise is 64 steps in each, without sampling.
    s, size = 64.0, 600
    law = np.outer(discrete(s, 0, size), discrete(s, 0, size))
    moved = np.outer(discrete(s, 24, size), discrete(s, 32, size))
    found = epsilon(1.0, 1, multiplier_on_integers(1.6, 40), 1e-5)
    assert spent(law, moved, found) <= 1e-5 < spent(law, moved, 0.99 * found)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_sampled_releases_of_integers_keep_the_epsilon(rate):
    s, size = 64.0, 700
    without = discrete(s, 0, size)
    sampled = (1 - rate) * without + rate * discrete(s, 60, size)
    law, moved = np.outer(without, without), np.outer(sampled, sampled)
    found = epsilon(rate, 2, multiplier_on_integers(64 / 60, 60), 1e-5)
    assert spent(law, moved, found) <= 1e-5 < spent(law, moved, 0.98 * found)


def truncated_run(values, n, noise, grid):
    """Return the law of one release over a batch with rate 1/2, of which a random pair is kept."""
    law = np.zeros_like(grid)
    for size in range(n + 1):
        for batch in combinations(range(n), size):
            kept = list(combinations(batch, min(size, 2)))
            for part in kept:
                law += stats.norm.pdf(grid, values[part], noise) * (grid[1] - grid[0]) / len(kept) / 2**n
    return law


def test_batches_that_do_not_fit_cost_no_more_than_their_probability():
    # Example 2 moves every sum by 1. But 0, 1 and 2 do not fit: without 0 or 1 it moves by 200.
    values = {(): 0, (0,): 200, (1,): 200, (0, 1): 0, (2,): 1, (0, 2): 201, (1, 2): 201}
    grid = np.linspace(-50, 250, 6001)
    without, joined = (truncated_run(values, n, 5.0, grid) for n in (2, 3))
    at_zero, at_one = (stats.norm.pdf(grid, mean, 5.0) * (grid[1] - grid[0]) for mean in (0, 1))
    ideal = [at_zero, (at_zero + at_one) / 2]
    beta = 1 / 8
    for eps in np.linspace(0, 1.5, 16):
        assert spent(without, joined, eps) <= spent(*ideal, eps) + (1 + math.exp(eps)) * beta
    # A third of them leaves out 2 itself. So 1/12 moves far, and without the term the bound would be wrong.
    assert spent(without, joined, 0.0) >= 1 / 12 > spent(*ideal, 0.0)


def in_higher_precision(probabilities, lowest, width, steps, epsilons):
    """Return delta of a sum of losses on a grid, by its characteristic function, where it is not negligible."""
    places = np.arange(lowest, lowest + len(probabilities))
    mean = math.fsum(probabilities * places)
    deviation = math.sqrt(math.fsum(probabilities * (places - mean) ** 2) * steps)
    size = 2 ** math.ceil(math.log2(40 * deviation))
    # Beyond this frequency, the characteristic function of the sum is below 1e-25.
    angles = 2 * np.pi / size * np.arange(math.ceil(size * 11 / (2 * np.pi * deviation)))
    missing = 1 - math.fsum(probabilities)
    moved = np.exp(1j * np.outer(angles, places - round(mean))) - 1
    one = np.array([complex(math.fsum(row.real), math.fsum(row.imag)) for row in moved * probabilities]) - missing
    whole = np.exp(steps * np.log1p(one))
    whole[1:] *= 2
    first = round(mean) * steps + round((mean - round(mean)) * steps) - size // 2
    # Below all epsilons a loss adds nothing, and beyond 16 deviations none has a probability above 1e-50.
    lowest_of_interest = max(first, math.floor(min(epsilons) / width))
    grid = np.arange(lowest_of_interest, first + size // 2 + math.ceil(16 * deviation))
    shifted = (grid - steps * round(mean)).astype(float)
    parts = np.array_split(shifted, math.ceil(len(shifted) / 256))
    density = np.concatenate([(whole * np.exp(-1j * np.outer(x, angles))).real.sum(1) / size for x in parts])
    return [math.fsum(density * -np.expm1(np.minimum(eps - grid * width, 0))) for eps in epsilons]


@pytest.mark.parametrize(("rate", "multiplier", "steps"), [(0.1, 100.0, 10**6), (0.01, 3.0, 10**5)])
def test_what_is_kept_for_arithmetic_is_enough(rate, multiplier, steps):
    accountant = accounting._accountant(((rate, steps, multiplier),), accounting.FINEST)
    own = from_gaussian_mechanism(multiplier, value_discretization_interval=accounting.FINEST, sampling_prob=rate)
    kept = accounting._ARITHMETIC + steps * accounting._ARITHMETIC_OF_A_STEP
    epsilons = [accountant.get_epsilon(delta) for delta in (1e-5, 1e-7, 1e-8)]
    losses = own._pmf_remove.to_dense_pmf()
    exact = in_higher_precision(losses._probs, losses._lower_loss, accounting.FINEST, steps, epsilons)
    for eps, delta in zip(epsilons, exact, strict=True):
        assert delta <= accountant.get_delta(eps) + kept
        assert delta == pytest.approx(accountant.get_delta(eps), rel=0.01)
    assert epsilon(rate, steps, multiplier, 1e-8) >= accountant.get_epsilon(1e-8 - 0.99 * kept)
