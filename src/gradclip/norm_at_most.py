"""Whether a norm is at most a threshold: checked in exact arithmetic, as what receives updates of others does."""

from __future__ import annotations

import math
import numbers
from fractions import Fraction

import numpy as np

from gradclip.arguments import check_threshold
from gradclip.arithmetic import ordinary_arithmetic
from gradclip.backends import whole_scalar
from gradclip.backends.arrays import Arrays
from gradclip.backends.conversions import host_arrays
from gradclip.backends.host.arrays import viewed_arrays
from gradclip.backends.host.backend import HOST
from gradclip.backends.registry import find
from gradclip.core import exact
from gradclip.core.coefficient import exceeds, undecided
from gradclip.core.norms import Order, measure
from gradclip.core.scopes import TREE
from gradclip.tree import flatten
from gradclip.typing import Ord, Threshold


@ordinary_arithmetic
def norm_at_most(tree: object, max_norm: Threshold, ord: Ord = 2) -> bool:
    """Say whether ||tree|| <= max_norm, for (sum |x|**p)**(1/p) of the leaves' values without any rounding.

    A norm that was computed cannot tell: in float32 that of (1, 1e-5) is 1.

    Args:
        tree: arrays of one framework in nested containers, or one array, as in `gradclip.global_norm`. Those on a
            device are copied to the host; integers count as they are.
        max_norm: the threshold, >= 0: a number (integers and fractions are not rounded), or a scalar array.
        ord: p: an integer from 1 to 1024, `inf` for the largest magnitude, `-inf` for the smallest; None means 2. Where
            there are complex numbers 2, `inf` or `-inf`.

    Returns:
        Whether it is. False where an element is NaN. Where one is infinite only `max_norm=inf` gives True.

    Raises:
        TypeError: a leaf is no array, leaves of two frameworks are mixed, or `max_norm` is no number.
        ValueError: `max_norm` is negative or NaN, `ord` is another one, which cannot be decided exactly, an integer is
            beyond 2**53, or the call is traced (`jax.jit`, `torch.compile` and the like), where values are not known.

    The norm is computed with a proven error, and exactly only where that leaves it open: of powers as integers, by
    Rump, Ogita and Oishi, "Accurate floating-point summation", 2008.

    >>> import numpy as np
    >>> norm_at_most(np.array([3.0, 4.0]), 5), norm_at_most(np.array([1, 1e-5], np.float32), 1)
    (True, False)

    """
    flat, order = flatten(tree), Order.parse(ord)
    backend = find(flat.leaves, flat.paths, max_norm)
    if not backend.visible:
        raise ValueError(
            "norm_at_most has to look at the values, which a traced call cannot. Call it outside of jit and vmap, or "
            "compare gradclip.global_norm, which is rounded."
        )
    threshold, limit = _known(max_norm)
    arrays = viewed_arrays(host_arrays(flat.leaves, flat.paths))
    if not exact.decidable(order.p, any_complex=arrays.any_complex):
        raise ValueError(
            f"norm_at_most decides exactly, which it cannot for ord={ord!r}"
            f"{' of complex numbers' if arrays.any_complex else ''}: it must be "
            f"{'2' if arrays.any_complex else f'an integer from 1 to {exact.LARGEST_POWER}'}, inf or -inf. "
            "For others compare gradclip.global_norm, which is rounded."
        )
    with HOST.precision():
        return _is_at_most(arrays, order, threshold, limit)


def _known(max_norm: Threshold) -> tuple[float, Fraction | None]:
    """Return a checked threshold as a float, and exactly; None for infinity."""
    value = whole_scalar(max_norm)
    threshold = check_threshold(value, backend=HOST)
    if math.isinf(threshold):
        return threshold, None
    number = value.item() if hasattr(value, "item") else value
    return threshold, Fraction(number if isinstance(number, numbers.Rational) else threshold)


def _is_at_most(arrays: Arrays, order: Order, threshold: float, limit: Fraction | None) -> bool:
    norm = measure(HOST, arrays, order)
    if limit is None:
        return not arrays.elements() or not np.isnan(HOST.largest(arrays, TREE))
    if not np.isfinite(norm.value):
        return False
    if limit != threshold or undecided(norm, threshold):
        return exact.at_most(HOST, arrays, order.p, limit, patient=True)
    return not exceeds(norm, threshold)
