"""Batches of examples in host memory. The kernels weigh and add them in a single pass."""

import math
from collections.abc import Sequence

import numpy as np

from gradclip import native
from gradclip.backends.host.arrays import HostArrays
from gradclip.core.formats import is_complex
from gradclip.native import describe_buffers

_COPIED = 1 << 18  # numbers at a time, small enough for the copies to stay in cache


def add_examples(
    arrays: HostArrays, weighing: Sequence[float], mask: np.ndarray | None, threads: int
) -> tuple[list[np.ndarray], np.ndarray] | None:
    """Return each array's weighted sum over examples, in float64, and each example's norm.

    The norm is 0 for examples outside `mask`. An example with a non-finite sum of squares adds nothing. Returns None if
    the kernels cannot read all of the arrays.
    """
    examples = arrays[0].shape[0]
    # The kernels read this vector first: NaN means that the example is left out.
    squares = np.zeros(examples) if mask is None else np.where(mask, 0.0, np.nan)
    widths = [math.prod(x.shape[1:]) * (2 if is_complex(x) else 1) for x in arrays]
    totals = np.zeros(max(1, sum(widths)))
    for rows in _blocks(arrays, sum(widths)):
        known, left_out = arrays.kernels, arrays.left_out
        if not all(x.data.flags.c_contiguous for x in arrays):
            # The kernels need each example to be contiguous.
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
    # Examples outside the mask still have their NaN mark.
    return sums, np.sqrt(squares if mask is None else np.where(mask, squares, 0.0))


def _blocks(arrays: HostArrays, width: int) -> list[slice]:
    """Return slices of the examples: one slice for contiguous arrays, otherwise blocks small enough to copy."""
    examples = arrays[0].shape[0]
    if all(x.data.flags.c_contiguous for x in arrays):
        return [slice(0, examples)] if examples else []
    many = max(1, _COPIED // max(1, width))
    return [slice(start, start + many) for start in range(0, examples, many)]
