"""Check in exact arithmetic whether a norm is at most a threshold, for example to verify updates from others."""

from __future__ import annotations

import math
import numbers
from fractions import Fraction

import numpy as np

from gradclip._src.annotations import Integers, Ord, Threshold, Where
from gradclip._src.backends import whole_scalar
from gradclip._src.backends.host import exact
from gradclip._src.backends.host.arrays import viewed_arrays
from gradclip._src.backends.host.backend import HOST
from gradclip._src.backends.on_host import host_arrays
from gradclip._src.backends.registry import find
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.coefficient import exceeds, undecided
from gradclip._src.core.layouts import TREE
from gradclip._src.core.norms import Order
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.passed.arguments import check_threshold
from gradclip._src.passed.leaves import choice_of, counted
from gradclip._src.public import public


@public
@with_subnormals
def norm_at_most(
    tree: object, max_norm: Threshold, *, ord: Ord = 2, where: Where = None, integers: Integers = "keep"
) -> bool:
    """Return whether ||tree|| <= max_norm, without any rounding. The norm is (sum |x|**p)**(1/p) over all leaves.

    Comparing a computed norm is not enough: in float32, the norm of (1, 1e-5) is 1.

    Args:
        tree: arrays of one framework in nested containers, or a single array, as in `gradclip.global_norm`. Arrays on a
            device are copied to the host. Integers and booleans do not count: if others send the tree, compare its
            dtypes with those that you expect.
        max_norm: the threshold, >= 0: a number or a scalar array. Integers and fractions are not rounded.
        ord: p: an integer from 1 to 1024, `inf` for the largest magnitude, `-inf` for the smallest; None means 2. For
            complex numbers only 2, `inf` or `-inf`.
        where: which leaves count, as in `gradclip.global_norm`.
        integers: "raise" refuses integers, as there.

    Returns:
        True if the norm is at most `max_norm`. False if an element is NaN. If an element is infinite, True only for
        `max_norm=inf`.

    Raises:
        TypeError: a leaf is not an array, leaves belong to different frameworks, all numbers are integers, or
            `max_norm` is not a number.
        ValueError: `max_norm` is negative or NaN, `ord` is not one of the values above, or the call is traced
            (`jax.jit`, `torch.compile`), which hides the values.

    The norm is computed with a proven error bound. Only if that leaves the answer open, the powers are added exactly,
    by the method of Rump, Ogita and Oishi, "Accurate floating-point summation", 2008.

    >>> import numpy as np
    >>> above = np.array([1, 1e-5], np.float32)
    >>> norm_at_most(np.array([3.0, 4.0]), 5), norm_at_most(above, 1)
    (True, False)

    """
    flat, order = counted(tree, choice_of(where, integers)), Order.parse(ord)
    backend = find(flat.leaves, flat.paths, max_norm)
    if not backend.visible:
        raise ValueError(
            "norm_at_most needs the values of the arrays, which a traced call does not have. Call it outside jit, "
            "vmap and mx.compile, or compare gradclip.global_norm, which is rounded."
        )
    threshold, limit = known_threshold(max_norm)
    arrays = viewed_arrays(host_arrays(flat.leaves, flat.paths))
    if not exact.decidable(order.p, any_complex=arrays.any_complex):
        raise ValueError(
            f"norm_at_most cannot decide exactly for ord={ord!r}"
            f"{' of complex numbers' if arrays.any_complex else ''}. Use "
            f"{'2' if arrays.any_complex else f'an integer from 1 to {exact.LARGEST_POWER}'}, inf or -inf. "
            "For other orders compare gradclip.global_norm, which is rounded."
        )
    with HOST.precision():
        return _is_at_most(arrays, order, threshold, limit)


def known_threshold(max_norm: Threshold) -> tuple[float, Fraction | None]:
    """Return a checked threshold as a float, and as an exact fraction; the fraction of infinity is None."""
    value = whole_scalar(max_norm)
    threshold = check_threshold(value, backend=HOST)
    if math.isinf(threshold):
        return threshold, None
    number = value.item() if hasattr(value, "item") else value
    return threshold, Fraction(number if isinstance(number, numbers.Rational) else threshold)


def _is_at_most(arrays: Arrays, order: Order, threshold: float, limit: Fraction | None) -> bool:
    norm = HOST.norms(arrays, order)
    if limit is None:
        return not arrays.elements() or not np.isnan(HOST.largest(arrays, TREE))
    if not np.isfinite(norm.value):
        return False
    if limit != threshold or undecided(norm, threshold):
        return exact.at_most(HOST, arrays, order.p, limit, patient=True)
    return not exceeds(norm, threshold)
