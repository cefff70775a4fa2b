"""How a sum over examples is added up, as users say it."""

import numbers
from dataclasses import KW_ONLY, dataclass
from typing import Any

from gradclip._src.annotations import SumDtype, WideDtype
from gradclip._src.core.layouts import TREE, real_numbers
from gradclip._src.private.sums.settings import as_count, as_format
from gradclip._src.public import public
from gradclip._src.tree import flatten
from gradclip._src.words import advised, typed


@public
@advised
@dataclass(frozen=True)
class SumLayout:
    """How a sum over examples is added up: what its rounding depends on besides the number of examples.

    A device adds up the examples of a microbatch in `summed_in`, rounds the result to the dtype of the sum, and adds
    up its microbatches in that dtype. You may add up several such partial sums: over devices, processes or virtual
    batches.

    Args:
        partial_sums: the most sums that are added up afterwards, in any order. For devices and virtual batches
            together, pass the product.
        partial_sums_in: the dtype to which partial sums are rounded and in which they are added up, as in a compressed
            reduction: "float32", "float64", "float16" or "bfloat16". None: the dtype of the sum.
        microbatches: the most microbatches that one partial sum is added up from. None: as many as the clipped function
            makes, or 1 in `clipped_sum_sensitivity`.
        summed_in: the dtype in which the device adds up examples: "float64", or "float32" if it has no float64.
        elements: the number of elements in one example's gradient, or the parameters, to count them. None: the most in
            any call of the clipped function so far, or 2**26 before the first call and in `clipped_sum_sensitivity`.

    Raises:
        ValueError: a count that is no whole number from 1 to 2**63 - 1, or an unknown dtype. TypeError: `elements` that
        is neither a number nor a tree of arrays.

    >>> import numpy as np
    >>> SumLayout(partial_sums=8, elements={"w": np.ones((3, 4))}).elements
    12
    """

    _: KW_ONLY
    partial_sums: int = 1
    partial_sums_in: SumDtype | None = None
    microbatches: int | None = None
    summed_in: WideDtype = "float64"
    elements: Any = None

    def __post_init__(self) -> None:
        checked: dict[str, object] = {"partial_sums": as_count("partial_sums", self.partial_sums)}
        checked["summed_in"] = as_format("summed_in", self.summed_in).name
        if self.microbatches is not None:
            checked["microbatches"] = as_count("microbatches", self.microbatches)
        if self.partial_sums_in is not None:
            checked["partial_sums_in"] = as_format("partial_sums_in", self.partial_sums_in, narrow=True).name
        if self.elements is not None:
            checked["elements"] = _counted(self.elements)
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def as_layout(layout: object) -> SumLayout:
    """Return the layout, or that of one sum for None. Raises TypeError for anything else."""
    if layout is None:
        return SumLayout()
    if not isinstance(layout, SumLayout):
        raise TypeError(f"layout must be a gradclip.SumLayout, such as SumLayout(partial_sums=8), got {typed(layout)}.")
    return layout


def _counted(elements: object) -> int:
    """Return a number of elements, or that in a tree of arrays."""
    if isinstance(elements, numbers.Number) or getattr(elements, "shape", None) == ():
        return as_count("elements", elements)
    leaves = flatten(elements).leaves
    if not all(hasattr(leaf, "shape") for leaf in leaves):
        raise TypeError(
            f"elements must be a number of elements or a tree of arrays, such as the parameters, got {typed(elements)}."
        )
    if not (count := real_numbers(leaves, TREE)):
        raise ValueError("elements is a tree without elements. Pass all parameters, or their number of elements.")
    return as_count("elements", count)
