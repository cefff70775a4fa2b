"""From noise to epsilon and back, by dp-accounting's PLD, with proofs that join it to what a run really does.

The ideal run. Each of T steps draws a batch, each example with probability q on its own, and releases a sum with
Gaussian noise of m times the sensitivity. Its privacy loss distribution is what dp-accounting computes, for adding or
removing one example. A real run differs in two things: its batches have a largest size, and its noise is integers.

1. Batches that do not fit. A real batch has at most `pad_to` examples. Let D and D + x be neighbours, and let b bound
   the probability that any batch of a run draws more than `pad_to` examples, from D + x and so from D too. Define an
   ideal run for this pair. Let S be what is drawn from D, in its places. A step releases f(S) plus noise, and 0 plus
   noise if S does not fit. With x drawn, it releases f(S + x), with x in one of the places that S leaves empty, or what
   it releases for S if S + x does not fit. Given S and its places, the noiseless values with and without x are within
   the sensitivity of each other. So by joint convexity a step is at least as private as dp-accounting's pair of
   N(0, m**2) and (1 - q) N(0, m**2) + q N(1, m**2). Earlier releases may choose f. The ideal run and the real one can
   use the same batches, places and noise. They then differ only if a batch does not fit, so with probability at most b,
   whatever the real run makes of such a batch. If the ideal run is (epsilon, delta) private, then for every event E
   P(E) <= P'(E) + b <= e**epsilon P'_neighbour(E) + delta + b <= e**epsilon (P_neighbour(E) + b) + delta + b,
   where P' is ideal. So the real run is (epsilon, delta + (1 + e**epsilon) * b) private.

2. Noise in the integers. A real release is an integer vector v of D numbers plus noise from the discrete Gaussian: each
   integer k with probability proportional to exp(-k**2 / (2 s**2)). Take t = 4 < s. Draw X = v + N(0, s**2 - t**2) in
   each coordinate, and then Y on the integers with probability exp(-(y - X)**2 / (2 t**2)) / Z_t(X). Z_t(x) is the sum
   of exp(-(k - x)**2 / (2 t**2)) over all integers k. By Poisson's summation formula it is
   t sqrt(2 pi) (1 + 2 sum over j >= 1 of exp(-2 pi**2 t**2 j**2) cos(2 pi j x)), between (1 - r) and (1 + r) times
   t sqrt(2 pi), with r = 2 sum over j >= 1 of exp(-2 pi**2 t**2 j**2) < 1e-136.
   Without Z_t, the convolution of both Gaussians is the Gaussian of variance s**2. So P(Y = y) is
   exp(-(y - v)**2 / (2 s**2)) / (s sqrt(2 pi)), up to a factor from 1 / (1 + r) to 1 / (1 - r). The discrete Gaussian
   has Z_s(0) in the place of s sqrt(2 pi), which by the same formula is 1 to 1 + r times as much, since s > t. So both
   laws of D numbers differ at each point by a factor from e**-h to e**h, with h = D log((1 + r) / (1 - r)).
   Y is made from X alone, and X is a release with Gaussian noise, of sqrt(1 - t**2 / s**2) times the multiplier. The
   factor holds for mixtures over batches, and for T releases, each of which may depend on those before, it is from
   e**-Th to e**Th. If the run with X is (epsilon, delta) private, then the real one is
   (epsilon + 2 T h, delta * e**(T h)) private. With T and D below 2**63, T h is below 1e-97. Where leaves have
   different s, the smallest counts: more noise only costs less.

3. Zeros in the place of a unit. Let D' be D with zeros for what a unit x adds. Both draw the same batches and places.
   Let S be what is drawn without x. With probability 1 - q both release the same. With probability q the sum of S and x
   is within the sensitivity for "zero_out" of that of S, which is what D' releases with x drawn or not. So the pair of
   step 1 dominates, also where a batch does not fit, since it does not fit for both.

`epsilon` adds more than 2 T h and takes more than a part T h from delta. What is assumed: dp-accounting. It rounds
losses up by design, but multiplies probabilities by Fourier transforms in float64, where each step may lose a unit in
the last place of 1. Beside exact values and sums of higher precision, its delta was too small by up to 5e-13 for 1e4
steps or fewer, and by up to 7e-11 for 1e6. So `epsilon` takes 1e-11 + T * 2**-52 from delta, and no delta may be below
1e-10.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from gradclip._src.private.noise.discrete import needed_for
from gradclip._src.private.sums.rounding import rounded_up
from gradclip._src.private.sums.settings import as_count, as_number

FINEST = 1e-4
"""The width of cells in which privacy losses are counted, as in dp-accounting."""

_SMALLEST_DELTA = 1e-10
_ARITHMETIC = 1e-11
_ARITHMETIC_OF_A_STEP = 2.0**-52
_SMOOTHED = 4
_FEWEST_STEPS = 64
_SMALLEST_MULTIPLIER = 2.0**-9
_LARGEST_MULTIPLIER = 2.0**20
_DIGITS = 4


class Releases(NamedTuple):
    """Sums that were released alike.

    Attributes:
        rate: the probability with which each example is in a batch.
        steps: how many sums, each over a batch of its own.
        multiplier: that of noise in the reals which is no more private than the noise.
        overflow: a bound on the probability that any batch of these does not fit.
    """

    rate: float
    steps: int
    multiplier: float
    overflow: float = 0.0


def epsilon(rate: float, steps: int, noise_multiplier: float, delta: float, *, overflow: float = 0.0) -> float:
    """Return epsilon, at `delta`, of releasing `steps` sums over Poisson batches with Gaussian noise.

    Args:
        rate: the probability with which each example is in a batch, above 0 and at most 1.
        steps: how many sums are released, each over a batch of its own. 0 gives 0.
        noise_multiplier: the standard deviation of the noise, divided by the largest L2 distance that adding or
            removing one example moves a sum.
        delta: at which probability the bound may fail, between 0 and 1.
        overflow: a bound on the probability that any batch of all steps did not fit, as `PoissonBatches.overflow`.

    Returns:
        A float, for the relation "add or remove one"; inf if there is none, as when `overflow` is not far below delta,
        or delta not above 2**-52 for each step, which is kept for the accountant's arithmetic.

    Raises:
        ValueError: a number out of range. TypeError: a value that is not a number. ModuleNotFoundError: dp-accounting
        is not installed.

    The accountant: Koskela et al. 2020; Doroshenko et al. 2022, "Connect the Dots". The module's docstring proves what
    is added to it.

    >>> # Gaussian noise, once:
    >>> round(epsilon(rate=1.0, steps=1, noise_multiplier=1.0, delta=1e-5), 2)
    4.38
    """
    run = _checked(rate, steps or 1, delta, overflow)
    multiplier = checked_multiplier(noise_multiplier)
    return run(multiplier) if steps else 0.0


def noise_multiplier(rate: float, steps: int, epsilon: float, delta: float, *, overflow: float = 0.0) -> float:
    """Return the smallest noise multiplier of 4 digits with which a run keeps `epsilon` at `delta`.

    The arguments are those of `epsilon`. Raises ValueError if no noise is enough, because batches may overflow,
    or if hardly any noise is needed, because delta is larger than the probability that an example is drawn.

    >>> round(noise_multiplier(rate=1.0, steps=1, epsilon=4.378, delta=1e-5), 2)
    1.0
    """
    return smallest_multiplier(_checked(rate, steps, delta, overflow), epsilon)


def multiplier_on_integers(noise_multiplier: float, steps: float) -> float:
    """Return the multiplier of Gaussian noise that is no more private than discrete Gaussian noise on the integers.

    Args:
        noise_multiplier: m. The noise has a standard deviation of at least m * steps integers.
        steps: the sensitivity, in integers.

    Returns:
        m * sqrt(1 - (4 / (m * steps))**2), rounded down. The module's docstring proves it.

    Raises:
        ValueError: noise below 64 integers.

    >>> multiplier_on_integers(1.0, 2**20) > 0.999999999992
    True
    """
    std = noise_multiplier * steps
    if not enough_steps(noise_multiplier, steps):
        raise ValueError(
            f"noise of {noise_multiplier:g} times the sensitivity has a standard deviation of {std:.3g} steps of the "
            f"grid, and the proof needs {_FEWEST_STEPS}. Pass {math.ceil(_FEWEST_STEPS / std)} times the grid or more."
        )
    return noise_multiplier * math.sqrt(1 - (_SMOOTHED / std) ** 2) * (1 - 2**-50)


def enough_steps(noise_multiplier: float, steps: float) -> bool:
    """Return whether noise on the integers is wide enough for `multiplier_on_integers`."""
    return noise_multiplier * steps >= _FEWEST_STEPS


def _checked(rate: float, steps: int, delta: float, overflow: float) -> Callable[..., float]:
    """Check all numbers of a run but the noise. Return the function from the noise multiplier to epsilon."""
    beta = as_number("overflow", overflow)
    if not 0 <= beta <= 1:
        raise ValueError(f"overflow must be a probability, got {overflow!r}.")
    rate, steps, delta = _rate(rate), as_count("steps", steps), checked_delta(delta)
    return lambda multiplier, finest=FINEST: epsilon_at((Releases(rate, steps, multiplier, beta),), delta, finest)


def smallest_multiplier(epsilon_of: Callable[[float, float], float], target: float) -> float:
    """Return the smallest number of 4 or 5 digits at which a falling function is at most a target.

    `epsilon_of` takes a noise multiplier and the width of cells in which losses are counted. Wide cells are fast and
    find the place, the finest decide.
    """
    target = _positive("epsilon", target)
    above = _above(epsilon_of, target)
    near = _near(epsilon_of, target, above)
    unit = _unit(near)
    near = min(above, _moved(epsilon_of, target, float(math.ceil(Fraction(near) / unit) * unit)))
    while True:
        unit = _unit(near)
        found = float(_first(partial(_keeps, epsilon_of, target, unit), math.ceil(Fraction(near) / unit)) * unit)
        if _unit(found) >= unit:
            return found
        near = found


def _unit(near: float) -> Fraction:
    """Return a power of ten, of which a number has 4 digits, or 5 where its half has 4."""
    half = 2.0 ** (math.ceil(math.log2(near)) - 1)
    return Fraction(10) ** (math.floor(math.log10(half)) - _DIGITS + 1)


def _above(epsilon_of: Callable[[float, float], float], target: float) -> float:
    """Return a power of two that keeps a target, by wide cells, if its half does not."""
    high, width = 1.0, 100 * FINEST
    while epsilon_of(high, width) > target:
        high *= 2
        if high > _LARGEST_MULTIPLIER:
            if width == FINEST:
                raise ValueError(
                    f"no noise of up to 2**20 times the sensitivity keeps epsilon={target:g}. If batches may overflow, "
                    "their probability is too close to delta: pass a larger pad_to, or a larger delta. Else pass a "
                    "larger epsilon, or, for millions of steps, a larger delta."
                )
            high, width = 1.0, FINEST
    while epsilon_of(high / 2, width) <= target:
        high /= 2
        if high < _SMALLEST_MULTIPLIER:
            raise ValueError(
                f"even noise of 2**-10 times the sensitivity keeps epsilon={target:g} at this delta: it is not below "
                "the probability that one unit is drawn at all. Pass a smaller delta."
            )
    return high


def _near(epsilon_of: Callable[[float, float], float], target: float, above: float) -> float:
    """Return where the finest cells would reach a target, as wider cells suggest.

    What cells add to epsilon grows with the square of their width.
    """
    near = _crossing(lambda multiplier: epsilon_of(multiplier, 100 * FINEST), target, above)
    near = _crossing(lambda multiplier: epsilon_of(multiplier, 10 * FINEST), target, near)
    added = (epsilon_of(near, 10 * FINEST) - epsilon_of(near, 5 * FINEST)) * (10**2 - 1) / (10**2 - 5**2)
    if not 0 < added < math.inf:
        return near
    return _crossing(lambda multiplier: epsilon_of(multiplier, 10 * FINEST), target + added, near)


def _crossing(falling: Callable[[float], float], target: float, high: float) -> float:
    """Return about where a function crosses a target, at `high` or below."""
    from scipy.optimize import brentq  # dp-accounting needs SciPy

    def off(log_multiplier: float) -> float:
        # Infinities and zeros are only far off.
        return math.log(min(max(falling(math.exp(log_multiplier)) / target, 1e-9), 1e9))

    end = math.log(high)
    if off(end) >= 0:
        return high
    step = 0.05
    while off(end - step) < 0:
        end, step = end - step, 2 * step
        if end < math.log(_SMALLEST_MULTIPLIER):
            return math.exp(end)
    return math.exp(brentq(off, end - step, end, xtol=1e-5))


def _moved(epsilon_of: Callable[[float, float], float], target: float, near: float) -> float:
    """Return where the finest cells would reach a target, by their epsilon nearby and the slope of wider ones."""
    found, *ends = (epsilon_of(near, FINEST), *(epsilon_of(x, 10 * FINEST) for x in (near, 1.01 * near)))
    if not 0 < ends[1] < ends[0] * (1 - 1e-6) or not 0 < found < math.inf or ends[0] == math.inf:
        return near
    moved = math.log(target / found) * math.log(1.01) / math.log(ends[1] / ends[0])
    return near * math.exp(max(-0.1, min(0.1, moved)))


def _keeps(epsilon_of: Callable[[float, float], float], target: float, unit: Fraction, count: int) -> bool:
    return count > 0 and epsilon_of(float(count * unit), FINEST) <= target


def _first(holds: Callable[[int], bool], start: int) -> int:
    """Return the smallest number from which on a condition holds. The search starts with a guess."""
    step = 1
    if holds(start):
        while holds(start - step):
            start, step = start - step, 2 * step
        low, high = start - step, start
    else:
        while not holds(start + step):
            start, step = start + step, 2 * step
        low, high = start, start + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


@lru_cache(maxsize=1024)
def epsilon_at(parts: tuple[Releases, ...], delta: float, finest: float = FINEST) -> float:
    """Return epsilon of all parts of a run. `finest`: the smallest width of cells in which losses are counted."""
    steps = sum(part.steps for part in parts)
    overflow = min(1.0, rounded_up(sum((Fraction(part.overflow) for part in parts), Fraction(0))))
    try:
        ideal = _accountant(tuple(part[:3] for part in parts), finest * _widening(parts))
    except OverflowError:  # cells wider than 700: so is epsilon, by far
        return math.inf
    found, lost = 0.0, _ARITHMETIC + steps * _ARITHMETIC_OF_A_STEP
    for _ in range(20):
        # A share of delta pays for the overflow at this epsilon or less. If no larger one follows, it holds.
        paid = _times_growth(overflow, found) * (1 + 2**-40)
        left = delta * (1 - 2**-50) - lost - paid
        if left <= 0:
            break
        with np.errstate(over="ignore"):
            needed = ideal.get_epsilon(left)
        if needed <= found:
            return math.nextafter(needed + 2.0**-200, math.inf)
        found = needed * (1 + 2**-30)
    return math.inf


def _times_growth(overflow: float, epsilon: float) -> float:
    """Return (1 + e**epsilon) * overflow; infinity where e**epsilon is beyond float64's range."""
    if not overflow:
        return 0.0
    return (1 + math.exp(epsilon)) * overflow if epsilon < 700 else math.inf


@lru_cache(maxsize=16)
def _accountant(parts: tuple[tuple[float, int, float], ...], width: float) -> Any:
    """Return dp-accounting's accountant of a run: of rates, steps and multipliers, one after the other."""
    with needed_for("Privacy accounting"):
        from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
        from dp_accounting.pld import PLDAccountant
    accountant = PLDAccountant(value_discretization_interval=width)
    for rate, steps, given in parts:
        multiplier = min(given, 1e150)  # the square of more is beyond float64, and more noise costs less
        accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(multiplier)), steps)
    return accountant


def _widening(parts: tuple[Releases, ...]) -> float:
    """Return how many times wider cells must be, so that there are not too many: losses are large where noise is small.

    One loss is about 1 / (2 m**2) + 10 / m at most. Their sum is near that of Gaussian noise, with or without sampling,
    and the squares of parts add up.
    """
    squares = 0.0
    for rate, steps, multiplier, _ in parts:
        share = math.sqrt(math.expm1(min(multiplier**-2, 100.0))) * rate
        squares += min(share, 1 / multiplier) ** 2 * steps
    least, whole = min(part.multiplier for part in parts), math.sqrt(squares)
    largest = max(0.5 * (1 / least) ** 2 + 10 / least, whole**2 / 2 + 8 * whole)
    return max(0.1, min(1.0, largest / 2), largest / 20)


def checked_multiplier(value: object) -> float:
    """Return a noise multiplier as a float. Raises ValueError if it is not positive and finite."""
    return _positive("noise_multiplier", value)


def _positive(name: str, value: object) -> float:
    number = as_number(name, value)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value!r}.")
    return number


def checked_delta(value: object) -> float:
    """Return delta as a float. Raises ValueError if it is not from 1e-10 to below 1."""
    number = as_number("delta", value)
    if not _SMALLEST_DELTA <= number < 1:
        raise ValueError(
            f"delta must be at least {_SMALLEST_DELTA:g} and below 1, got {value!r}. The accountant computes in float64"
            " and cannot tell smaller ones from 0. A common choice is 1e-5, below 1 / n."
        )
    return number


def _rate(value: object) -> float:
    number = as_number("rate", value)
    if not 0 < number <= 1:
        raise ValueError(f"rate must be above 0 and at most 1, got {value!r}.")
    return number
