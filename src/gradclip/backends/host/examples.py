"""Batches of examples in host memory, weighed and added up by the kernels in one reading."""

import math
from collections.abc import Sequence

import numpy as np

from gradclip import native
from gradclip.backends.formats import is_complex
from gradclip.backends.host.arrays import HostArrays
from gradclip.native import describe_buffers

_COPIED = 1 << 18  # numbers at a time, little enough for the copies to stay in cache


def add_examples(
    arrays: HostArrays, weighing: Sequence[float], mask: np.ndarray | None, threads: int
) -> tuple[list[np.ndarray], np.ndarray] | None:
    """Return the weighted sum over examples of each array, in float64, and each example's norm.

    Examples outside of `mask` have 0, and those whose sum of squares is not finite add nothing. None where the kernels
    do not know all of the arrays.
    """
    examples = arrays[0].shape[0]
    # The kernels read this vector first: an example that has NaN in it is left out.
    squares = np.zeros(examples) if mask is None else np.where(mask, 0.0, np.nan)
    widths = [math.prod(x.shape[1:]) * (2 if is_complex(x) else 1) for x in arrays]
    totals = np.zeros(max(1, sum(widths)))
    for rows in _blocks(arrays, sum(widths)):
        known, left_out = arrays.kernels, arrays.left_out
        if not all(x.data.flags.c_contiguous for x in arrays):
            # The kernels want each example in one piece.
            known, left_out = describe_buffers([np.ascontiguousarray(x.data[rows]) for x in arrays])
        if not known or left_out:
            return None
        buffers = [describe_buffers([buffer]).kernels for buffer in (squares[rows], totals)]
        some = len(squares[rows])
        native.kernels.add_examples(known, some, list(map(float, weighing)), buffers[0], buffers[1], threads)
    if not examples:
        return None
    ends = np.cumsum(widths)
    sums = [
        totals[end - width : end].view(np.complex128 if is_complex(x) else np.float64).reshape(x.shape[1:])
        for x, width, end in zip(arrays, widths, ends, strict=True)
    ]
    # Examples outside of the mask still have the NaN that marks them.
    return sums, np.sqrt(squares if mask is None else np.where(mask, squares, 0.0))


def _blocks(arrays: HostArrays, width: int) -> list[slice]:
    """Return slices of the examples: one of all, or where they do not lie in one piece, of as many as are copied."""
    examples = arrays[0].shape[0]
    if all(x.data.flags.c_contiguous for x in arrays):
        return [slice(0, examples)] if examples else []
    many = max(1, _COPIED // max(1, width))
    return [slice(start, start + many) for start in range(0, examples, many)]
