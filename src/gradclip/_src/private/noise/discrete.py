"""Discrete Gaussian noise on integers, drawn exactly from secure random bits, by many threads.

The noise of scale s is z with probability proportional to exp(-z**2 / (2 s**2)), for every integer z: Canonne, Kamath
and Steinke 2020, "The Discrete Gaussian for Differential Privacy". A sum beyond int64 becomes the nearest int64, which
is a function of the released sum.

"system" and "urandom" draw many numbers at once, with the proof below; the kernels do it where they are in use, and
give the same numbers for the same bits. "opendp" is OpenDP's sampler, which computes with integers and fractions alone,
one number at a time. All let other threads run while they draw, and none repeats itself in a forked process: bits are
the system's, or of a key that the system draws for each call and thread, and OpenDP's notice a fork.

Discrete Gaussian noise by rejection, many draws at once: exact, from uniform bits alone.
Wanted is z with probability proportional to exp(-z**2 / (2 s**2)), for every integer z. Let t be a power of two, at
least s log 2, and let A >= (s log 2 / t)**2 / 2. An attempt draws U uniformly below t, V with probability 2**-(V + 1)
for V = 0, 1, ... (how many of a row of bits are 0 before the first 1), and a sign. With y = U + t V it is accepted with
probability

    p = 2**V exp(-g), g = y**2 / (2 s**2) + A.

Why p is at most 1. Since y >= t V, log p <= V log 2 - (t V / s)**2 / 2 - A, and the maximum over all real V is
(s log 2 / t)**2 / 2 - A <= 0.
Why it is exact. U and V give each y >= 0 in one way, so an attempt gives y and is accepted with probability
2**-(V + 1) / t * p = exp(-y**2 / (2 s**2)) times a constant. Both signs are equally likely, and 0 with a minus is
rejected. So each accepted z has the wanted distribution. Attempts are independent, and the accepted ones are taken in
their order, so the draws are independent.

The bits of an attempt. The first of two words has a sign, then bits of V, and U in its last bits. The second has 52
bits of W and 12 bits of V, which come after those of the first word where U has 11 bits or more. V is read from at most
52 bits. Where all are 0, more words are drawn, until one is not.

How p is compared with a uniform number W exactly. W is known by its first 52 bits, so it lies from k / 2**52 to
(k + 1) / 2**52. p in float64 is off by a relative error of less than 2**-31 where g <= 100 and V <= 40: no part of the
exponent is above 100, so its roundings, and that of U to 51 bits, add up to less than 2**-42, and the exponential is
off by less than 2**-32. (The kernels compute it as 2**n times Taylor's polynomial of order 10, at most
log 2 / 2 + 2**-46 from 0: the remainder is below 2**-41, the roundings below 2**-46. NumPy has `exp`.) Where g > 100,
100 stands for it. Then p is below 2**-104, and so is what stands for it: W is never decided to be below p, which needs
p > 2**-53, and it is above p if k is 1 or more, but not if k is 0. If both ends of W are on one side of p, whatever
that error, the comparison is decided. If not, about once in 10**9 attempts, or if V is above 40 or y is 2**62 or more,
p is computed in decimals, with bounds, and more bits of W are drawn until they decide. So W is uniform to all its bits,
and all that is assumed of floating point is IEEE 754, and without kernels that the relative error of `numpy.exp` is
below 2**-32. Above a scale of 2**58, up to one attempt in 16 is beyond that and takes the decimals.

The errors of exponent, polynomial and comparison are checked by machine: proofs/sampler.py.
"""

import decimal
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from decimal import Decimal
from fractions import Fraction
from functools import partial
from threading import Lock
from typing import NamedTuple

import numpy as np

from gradclip._src import native
from gradclip._src.backends.host.arrays import aligned_empty
from gradclip._src.private.noise.draws import Draws, SystemDraws, keystream

_MARGIN = 2.0**-30
_FARTHEST = 100.0
_HALF_SQUARE = 0.240227  # above log(2)**2 / 2
_LARGEST_V = 40
_ATTEMPTS = 7 << 10  # below 128 KiB of words: allocators map larger arrays anew, page by page
_BLOCK = 1 << 11  # attempts that NumPy decides at once


class DiscreteGaussian(NamedTuple):
    """The noise that is wanted, and how attempts are made: `scale` is s, 2**`bits` is t and `shift` is A."""

    scale: float
    bits: int
    shift: float

    @property
    def bits_of_v(self) -> int:
        """How many bits of an attempt's two words say what V is."""
        return min(52, 63 - self.bits + (12 if self.bits >= 11 else 0))


def target_of(scale: float) -> DiscreteGaussian:
    """Return how to draw noise of standard deviation `scale`, from 1 to 2**60. Raises ValueError for others.

    >>> target_of(1024.0).bits
    10
    """
    if not 1 <= scale <= 2.0**60:
        raise ValueError(f"the standard deviation of noise on integers must be from 1 to 2**60, got {scale!r}.")
    bits = math.frexp(scale * 0.6931472)[1]  # above log 2
    return DiscreteGaussian(scale, bits, _HALF_SQUARE * math.ldexp(scale, -bits) ** 2 * (1 + 2**-40))


def with_noise(values: np.ndarray, scale: float, draws: Draws) -> np.ndarray:
    """Return int64 integers (1-D) plus independent noise. A sum beyond int64 becomes the nearest int64."""
    target, values = target_of(scale), np.ascontiguousarray(values, np.int64)
    sums, filled = np.empty(values.shape, np.int64), 0
    while filled < values.size:
        attempts = min(_ATTEMPTS, 64 + 5 * (values.size - filled) // 2)
        filled = _filled(draws, target, draws.words(2 * attempts), values, sums, filled)
    return sums


def _filled(
    draws: Draws, target: DiscreteGaussian, words: np.ndarray, values: np.ndarray, sums: np.ndarray, filled: int
) -> int:
    """Write sums from one place on, by attempts of these words. Return the place after the last of them."""
    go_on, used, attempts = _going_on(target, words, values, sums), 0, words.size // 2
    while True:
        used, filled = go_on((used, filled))
        if used == attempts or filled == values.size:
            return filled
        noise = _one(draws, target, int(words[used]), int(words[attempts + used]))
        used += 1
        if noise is not None:
            sums[filled] = max(-(2**63), min(2**63 - 1, int(values[filled]) + noise))
            filled += 1


Place = tuple[int, int]
"""How many attempts were made, and how many sums were written."""


def _going_on(
    target: DiscreteGaussian, words: np.ndarray, values: np.ndarray, sums: np.ndarray
) -> Callable[[Place], Place]:
    """Return what makes attempts from one place to the next that is not settled, or to the end, and returns that."""
    if native.kernels is not None:
        described = [native.describe_buffers([x.view(np.float64)]).kernels for x in (words, values, sums)]
        return partial(native.kernels.add_noise, (target.scale, target.bits, target.shift), *described)
    return partial(_by_numpy, target, words.reshape(2, -1), values, sums)


def _by_numpy(target: DiscreteGaussian, words: np.ndarray, values: np.ndarray, sums: np.ndarray, start: Place) -> Place:
    used, filled = start
    while used < words.shape[1] and filled < values.size:
        first, second = words[:, used : used + _BLOCK]
        z, yes, no = _decided(target, first, second)
        settled = yes | no
        count = first.size if settled.all() else int(np.argmin(settled))
        accepted = np.flatnonzero(yes[:count])[: values.size - filled]
        own = slice(filled, filled + accepted.size)
        sums[own] = _nearest_sums(values[own], z[accepted])
        used, filled = used + count, own.stop
        if count < first.size:
            break
    return used, filled


def _nearest_sums(values: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Return the sums of int64 integers, clamped to int64."""
    sums = values + noise  # wraps around
    ends = np.where(noise < 0, -(2**63), 2**63 - 1)
    return np.where((sums < values) != (noise < 0), ends, sums)


def _decided(
    target: DiscreteGaussian, first: np.ndarray, second: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what attempts give, which are accepted and which rejected, whatever the error of floating point."""
    u = first & np.uint64(2**target.bits - 1)
    row = first - u << np.uint64(1)
    if target.bits >= 11:
        row |= (second & np.uint64(4095)) << np.uint64(target.bits - 11)
    v = 52 - np.frexp((row >> np.uint64(12)).astype(np.float64))[1].astype(np.int64)
    fits = (row >> np.uint64(12) != 0) & (v <= min(_LARGEST_V, 2 ** (62 - target.bits) - 1))
    v = np.where(fits, v, 0)
    away = (u.astype(np.float64) + np.ldexp(v.astype(np.float64), target.bits)) / target.scale
    p = np.exp(v * math.log(2) - np.minimum(0.5 * away * away + target.shift, _FARTHEST))
    low = np.ldexp((second >> np.uint64(12)).astype(np.float64), -52)
    below, above = low + 2.0**-52 <= p * (1 - _MARGIN), low >= p * (1 + _MARGIN)
    z, minus = u.astype(np.int64) + (v << target.bits), first >> np.uint64(63) != 0
    minus_zero = minus & (z == 0)
    return np.where(minus, -z, z), fits & below & ~minus_zero, fits & (above | below & minus_zero)


def _one(draws: Draws, target: DiscreteGaussian, first: int, second: int) -> int | None:
    """Return what one attempt gives in exact arithmetic: an integer, or None if it is rejected."""
    spare, count = first >> target.bits & 2 ** (63 - target.bits) - 1, 63 - target.bits
    if target.bits >= 11:
        spare, count = spare << 12 | second & 4095, count + 12
    row, zeros = spare >> (count - target.bits_of_v), target.bits_of_v
    while not row:
        row, zeros = int(draws.words(1)[0]), zeros + 64
    v = zeros - row.bit_length()
    y, minus = (first & (2**target.bits - 1)) + (v << target.bits), first >> 63
    gamma = Fraction(y) ** 2 / (2 * Fraction(target.scale) ** 2) + Fraction(target.shift)
    if not _below(draws, second >> 12, v, gamma) or (minus and not y):
        return None
    return -y if minus else y


def _below(draws: Draws, known: int, doublings: int, gamma: Fraction) -> bool:
    """Return whether a uniform number that begins with 52 known bits is below 2**doublings * exp(-gamma)."""
    bits, digits = 52, 40
    while True:
        low, high = (2**doublings * Fraction(end) for end in _exp_bounds(gamma, digits))
        if Fraction(known + 1, 2**bits) <= low:
            return True
        if Fraction(known, 2**bits) >= high:
            return False
        known, bits, digits = known << 64 | int(draws.words(1)[0]), bits + 64, digits + 40


def _exp_bounds(gamma: Fraction, digits: int) -> tuple[Fraction, Fraction]:
    """Return bounds of exp(-gamma). `Decimal.exp` is right to half a unit in the last digit."""
    ends = []
    for rounding, sign in ((decimal.ROUND_CEILING, -1), (decimal.ROUND_FLOOR, 1)):
        with decimal.localcontext(
            # No traps: Python's defaults are those of `decimal.DefaultContext`, which a user may have changed.
            decimal.Context(
                prec=digits, rounding=rounding, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX, clamp=0, traps=[]
            )
        ):
            value = (-(Decimal(gamma.numerator) / Decimal(gamma.denominator))).exp()
            ends.append(Fraction(value) * (1 + sign * Fraction(10) ** (1 - digits)))
    return ends[0], ends[1]


EXACT = ("system", "urandom", "opendp")

Sampler = Callable[[np.ndarray], np.ndarray]
Measurement = Callable[[list[int]], list[int]]

_AT_ONCE = {"system": 1 << 16, "urandom": 1 << 16, "opendp": 1 << 10}  # elements: a millisecond or more
_enabling = Lock()


def with_discrete_gaussian(
    arrays: Sequence[np.ndarray],
    scale: float,
    source: str = "system",
    threads: int | None = None,
    *,
    around: Callable[[Sampler], Sampler] = lambda sampler: sampler,
) -> list[np.ndarray]:
    """Return int64 integers (1-D) plus independent noise, in arrays of the same dtypes.

    Args:
        arrays: the integers, or what `around` makes integers of.
        scale: the standard deviation of the noise.
        source: one of `EXACT`.
        threads: None for as many as processors may be used.
        around: makes integers before a sampler and their sums what they were after it, piece by piece.
    """
    size, sums = _AT_ONCE[source], [aligned_empty(x.shape, x.dtype) for x in arrays]
    pieces = [
        (x[at : at + size], y[at : at + size])
        for x, y in zip(arrays, sums, strict=True)
        for at in range(0, x.size, size)
    ]
    workers = min(len(pieces), processors() if threads is None else threads)

    def write(own: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        plus_noise = around(sampler(source, scale))  # one for each thread
        for given, into in own:
            into[:] = plus_noise(given)

    if workers > 1:
        try:
            with ThreadPoolExecutor(workers) as pool:
                parts = [pool.submit(write, pieces[first::workers]) for first in range(workers)]
        except RuntimeError:  # no thread can be started, as at the end of a program
            write(pieces)
        else:
            for part in parts:
                part.result()
    elif workers:
        write(pieces)
    return sums


def sampler(source: str, scale: float) -> Sampler:
    """Return what adds the noise to an array of int64 integers."""
    if source == "opendp":
        measurement = gaussian(scale)
        return lambda piece: np.array(measurement(piece.tolist()), np.int64)
    draws = keystream() if source == "system" else SystemDraws()
    return partial(with_noise, scale=scale, draws=draws)


def gaussian(scale: float) -> Measurement:
    """Return OpenDP's measurement, which adds the noise to a list of int64 integers."""
    with needed_for("noise by rng='opendp'"):
        # Not `opendp.prelude`, which imports scikit-learn and Polars if they are installed.
        from opendp.domains import atom_domain, vector_domain
        from opendp.measurements import make_gaussian
        from opendp.metrics import l2_distance
        from opendp.mod import GLOBAL_FEATURES, disable_features, enable_features
    with _enabling:
        off = "contrib" not in GLOBAL_FEATURES
        enable_features("contrib")
        try:
            return make_gaussian(vector_domain(atom_domain(T="i64")), l2_distance(T="f64"), scale=scale)
        finally:
            if off:
                disable_features("contrib")


def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def needed_for(what: str) -> Iterator[None]:
    """If an import inside the block fails for want of a package, say how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0].replace("_", "-")
        raise ModuleNotFoundError(
            f"{what} needs {missing}, which is not installed. "
            "To install: pip install '.[private]' in a clone of gradclip",
            name=error.name,
        ) from error
