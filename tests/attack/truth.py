"""Norms in integers of any size: quick for many elements, for every dtype, and for orders that are multiples of 1/2."""

import math
from fractions import Fraction

import numpy as np

_DIGITS = 200
"""Binary digits that are kept of a root."""


def _integers(values):
    """Return magnitudes as integers of any size, and the exponent of the power of two that these are multiples of."""
    assert np.isfinite(values).all(), "not everything is finite"
    mantissas, exponents = np.frexp(np.abs(values))
    used = exponents[values != 0]
    lowest = int(used.min()) if used.size else 0
    shifts = np.where(values == 0, 0, exponents - lowest)
    return (mantissas * 2.0**53).astype(np.int64).astype(object) << shifts.astype(object), lowest - 53


def _squares(flat):
    """Return the squares of the magnitudes of real or complex numbers, and the exponent of their unit, an even one."""
    if not np.iscomplexobj(flat):
        integers, unit = _integers(flat.astype(np.float64))
        return integers * integers, 2 * unit
    parts, unit = _integers(np.concatenate([flat.real, flat.imag]).astype(np.float64))
    squares = parts * parts
    return squares[: flat.size] + squares[flat.size :], 2 * unit


def power(leaves, p):
    """Return the norm of order p to the power p, or for `inf` and `-inf` its square.

    Exact where every term is a fraction: for whole orders of real numbers and even ones of complex numbers. Otherwise
    each term is rounded down in its 200th digit or later.
    """
    flats = [np.asarray(leaf).reshape(-1) for leaf in leaves if np.size(leaf)]
    if math.isinf(p):
        choose = max if p > 0 else min
        found = [(choose(squares), unit) for squares, unit in map(_squares, flats)]
        return choose((Fraction(square) * Fraction(2) ** unit for square, unit in found), default=Fraction(0))
    return sum((_sum_of_powers(flat, p) for flat in flats), Fraction(0))


def _sum_of_powers(flat, p):
    if p % 2 == 0:
        squares, unit = _squares(flat)
        return Fraction(int((squares ** int(p // 2)).sum())) * Fraction(2) ** (unit * int(p // 2))
    if p % 1 == 0 and not np.iscomplexobj(flat):
        integers, unit = _integers(flat.astype(np.float64))
        return Fraction(int((integers ** int(p)).sum())) * Fraction(2) ** (unit * int(p))
    # |x|**p = (|x|**2) ** (2p / 4), and so for the unit, the square of a power of two.
    squares, unit = _squares(flat)
    total = sum(_fourth_root(square ** int(2 * p)) for square in squares)
    whole, odd = divmod(unit * int(2 * p) // 2, 2)
    root_of_two = Fraction(math.isqrt(2 << 2 * _DIGITS), 1 << _DIGITS) if odd else 1
    return Fraction(total, 1 << _DIGITS) * Fraction(2) ** whole * root_of_two


def _fourth_root(n):
    return math.isqrt(math.isqrt(n << 4 * _DIGITS))


def _raised(x, p):
    """Return a fraction to a power that is a multiple of 1/2, rounded down in its 200th digit where it has no end."""
    if math.isinf(p):
        return x * x
    if p % 1 == 0:
        return x ** int(p)
    square = x ** int(2 * p)
    return Fraction(math.isqrt(square.numerator * square.denominator << 2 * _DIGITS), square.denominator << _DIGITS)


def at_most(leaves, p, threshold):
    """Say whether the norm is at most the threshold; one that is within 2**-150 of it counts as at most, if rounded."""
    if threshold == math.inf:
        return True
    total, most = power(leaves, p), _raised(Fraction(threshold), p)
    rounded = not math.isinf(p) and (p % 1 != 0 or (p % 2 and any(map(np.iscomplexobj, leaves))))
    return total <= (most * (1 + Fraction(2) ** -150) if rounded else most)


def norm(leaves, p):
    """Return the norm, off by less than 2**-90 of it, as a fraction."""
    total, p = power(leaves, p), Fraction(2 if math.isinf(p) else p)
    if not total:
        return total
    digits = total.numerator.bit_length() - total.denominator.bit_length()
    log2 = digits + Fraction(math.log2(total / Fraction(2) ** digits))
    whole = int(log2 / p)
    x = Fraction(2 ** float(log2 / p - whole)) * Fraction(2) ** whole
    for _ in range(2):  # steps of Newton, each of which doubles the digits
        x *= 1 + (total / _raised(x, p) - 1) / p
        unit = Fraction(2) ** (x.numerator.bit_length() - x.denominator.bit_length() - 130)
        x = round(x / unit) * unit
    return x
