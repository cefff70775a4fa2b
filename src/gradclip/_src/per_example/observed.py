"""What the calls of a clipped function have shown about its gradients: their number of elements and their dtypes."""

import math
import numbers
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gradclip._src.core.formats import SUPPORTED, bare_name, format_named, is_complex_name
from gradclip._src.core.layouts import EXAMPLE, TREE, Scope
from gradclip._src.per_example.microbatches import Memory
from gradclip._src.per_example.quantities import as_count
from gradclip._src.per_example.rounding import ASSUMED_ELEMENTS, FactoredGradients
from gradclip._src.tree import flatten
from gradclip._src.words import listed, typed

_SEVERAL_TERMS = 2


class ObservedGradients:
    """The largest gradient of an example and the narrowest dtype so far, and what a sensitivity assumed before."""

    def __init__(self) -> None:
        self._elements = 0
        self._narrowest: str | None = None
        self._assumed_elements: int | None = None
        self._assumed_dtype = False
        self._checked_use = False
        self._smallest_microbatch: int | None = None
        self._factors: int | None = None
        self._promised_factors = _SEVERAL_TERMS

    def noted_size(self, size: int) -> int:
        """Record the number of examples in a microbatch, and return it."""
        self._smallest_microbatch = min(size, self._smallest_microbatch or size)
        return size

    def note_plan(self, *, ghost: bool, cancels: bool) -> None:
        """Record whether gradients of a call come in factors, and whether those may cancel; warn if that is new."""
        self._factors = max(self._factors or 0, _SEVERAL_TERMS if cancels else int(ghost))
        if self._factors > self._promised_factors:
            self._promised_factors = _SEVERAL_TERMS
            warnings.warn(
                "sensitivity() was called when fewer gradients came in factors than in this batch. Call sensitivity() "
                "again, or pass method='materialize' to clipped_grad.",
                RuntimeWarning,
                stacklevel=3,
            )

    def factors(self, examples: int | None) -> FactoredGradients | None:
        """Return what a sensitivity must assume of gradients in factors, of so many examples at a time.

        Before the first call, that all are.
        """
        self._promised_factors = _SEVERAL_TERMS if self._factors is None else self._factors
        return FactoredGradients(examples, self._promised_factors == _SEVERAL_TERMS) if self._promised_factors else None

    def microbatches(self, size: int | Memory | None, count: int | None) -> int:
        """Return the most microbatches of a batch of `count` examples. Those of unknown size hold one example."""
        if isinstance(size, Memory):
            size = self._smallest_microbatch or 1
        return -(-count // size) if count and size else 1

    def check_used(self, unused: Callable[[], Sequence[str]], called: str) -> None:
        """Warn in the first call about parameters that the function does not use: their gradients are zero.

        `called`: the call that runs a module with given parameters, for the warning.
        """
        if self._checked_use:
            return
        self._checked_use = True
        names = unused()
        if names:
            warnings.warn(
                f"the function does not use {listed(names)}: these gradients are zero, and nothing is learned. "
                f"Compute with the parameters that are passed in, as {called}, not with those of an enclosing module.",
                UserWarning,
                stacklevel=3,
            )

    def note(self, leaves: Iterable[Any]) -> None:
        """Record the leaves of a call, batch on axis 0; warn if `sensitivity()` assumed less.

        That is, fewer elements, or a wider dtype.
        """
        leaves = list(leaves)
        names = [name for name in (bare_name(leaf.dtype) for leaf in leaves) if name in SUPPORTED]
        self._elements = max(self._elements, _elements(leaves, EXAMPLE))
        known = names if self._narrowest is None else [*names, self._narrowest]
        self._narrowest = min(known, key=lambda name: format_named(name).precision, default=None)
        narrow = self._narrowest is not None and format_named(self._narrowest).precision < 24
        if self._elements > (self._assumed_elements or math.inf) or (self._assumed_dtype and narrow):
            self._assumed_elements, self._assumed_dtype = None, False
            warnings.warn(
                f"sensitivity() was called before the first batch and assumed at most {ASSUMED_ELEMENTS} elements and "
                f"results in float32. This batch has {self._elements} elements per example, the narrowest of them "
                f"{self._narrowest}. Call sensitivity() again after a batch, or pass elements= and partial_sums_in=.",
                RuntimeWarning,
                stacklevel=2,
            )

    def elements(self, given: object) -> int | None:
        """Return a number of elements: the given one, that of a given tree, or the most seen. None before any call."""
        if isinstance(given, numbers.Integral):
            return as_count("elements", given)
        if given is not None:
            leaves = flatten(given).leaves
            if not all(hasattr(leaf, "shape") for leaf in leaves):
                raise TypeError(
                    "elements must be a number of elements or a tree of arrays, such as the parameters, got "
                    f"{typed(given)}."
                )
            return as_count("elements", _elements(leaves, TREE))
        if not self._elements:
            self._assumed_elements = ASSUMED_ELEMENTS
        return self._elements or None

    def narrowest(self) -> str:
        """Return the narrowest real dtype so far, or float32 before the first call."""
        self._assumed_dtype |= self._narrowest is None
        return format_named(self._narrowest or "float32").name


def _elements(leaves: Iterable[Any], scope: Scope) -> int:
    """Return how many real numbers share one norm in these leaves."""
    return sum(scope.elements(x.shape) * (1 + is_complex_name(bare_name(x.dtype))) for x in leaves)
