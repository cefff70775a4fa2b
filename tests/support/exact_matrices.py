"""Products of matrices in exact arithmetic, and the bound of Higham (2002) for rounded ones."""

from decimal import Decimal, localcontext
from fractions import Fraction
from itertools import product

import numpy as np

V = Fraction(1, 2**53)


def gamma(roundings):
    """Return the largest relative error of a term in float64 that goes through this many roundings."""
    return roundings * V / (1 - roundings * V)


def fractions(side):
    return np.array([Fraction(float(value)) for value in np.asarray(side).ravel()], object).reshape(np.shape(side))


def check_outer_sums(found, weights, left, right):
    """Check totals (blocks, rows, columns) against exact ones; `left` is None for ones with one row."""
    found, right = np.asarray(found, np.float64), fractions(right)
    each = fractions(np.repeat(np.asarray(weights), right.shape[1] // len(weights)))
    left = np.ones((*right.shape[:2], 1), object) if left is None else fractions(left)
    assert found.shape == (len(left), left.shape[2], right.shape[2])
    for g, i, j in product(*map(range, found.shape)):
        terms = each * left[g, :, i] * right[g, :, j]
        assert abs(Fraction(found[g, i, j]) - terms.sum()) <= gamma(len(each) + 2) * np.abs(terms).sum()


def check_gram_squares(squares, sizes, left, right, roundings):
    """Check squared norms and sums of products of norms, of sums of outer products (N, T, rows), (N, T, columns)."""
    for n, (square, size) in enumerate(zip(squares, sizes, strict=True)):
        exact = _size(left[n], right[n])
        assert abs(Fraction(float(size)) - exact) <= gamma(roundings) * exact
        assert abs(Fraction(float(square)) - _square(left[n], right[n])) <= gamma(roundings) * exact**2


def _square(left, right):
    return sum(entry * entry for entry in (fractions(left).T @ fractions(right)).ravel())


def _size(left, right):
    """Return the sum over t of |left_t| |right_t|, to 60 digits."""
    with localcontext() as context:
        context.prec = 60

        def norm(row):
            return sum((Decimal(float(value)) ** 2 for value in row), Decimal(0)).sqrt()

        return Fraction(sum((norm(a) * norm(b) for a, b in zip(left, right, strict=True)), Decimal(0)))
