"""The arrays that share a norm, with what is known about them as a whole."""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self, TypeVar

from gradclip._src.core.formats import (
    FLOAT32,
    SUPPORTED,
    Format,
    bare_name,
    dtype_name,
    format_named,
    is_complex_name,
    is_quantized_name,
)
from gradclip._src.core.layouts import Scope
from gradclip._src.core.values import Array, elements_of

A = TypeVar("A", bound=Array)


class Arrays(Sequence[Any]):
    """A list of a backend's arrays, with the names of their dtypes and the formats of their real numbers."""

    dtypes: frozenset[str]
    formats: frozenset[Format]
    any_complex: bool  # whether any array is complex
    only_halves: bool  # whether float32 precision is enough for their norm
    grouped: Any = None  # by device and dtype, cached by a backend
    each: tuple[float, Any] | None = None  # an order and the norm of each, cached by a backend until they are written

    def __init__(self, items: Sequence[Any], dtypes: Iterable[str] | None = None) -> None:
        self._given = items
        self.dtypes = frozenset(map(bare_name, {x.dtype for x in items}) if dtypes is None else dtypes)
        self.formats, self.any_complex, self.only_halves = _OF_DTYPES[self.dtypes]

    @property
    def sources(self) -> Sequence[Any]:
        """The arrays as they were passed in."""
        return self._given

    @property
    def items(self) -> Sequence[Any]:
        """The arrays, each as the backend's array type."""
        return self._given

    def __len__(self) -> int:
        return len(self._given)

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]

    # Some compilers that trace Python code do not know that iterating a `Sequence` ends at an IndexError.
    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def alike(self, items: Sequence[Any]) -> Self:
        """Return other items as an object of the same class."""
        return type(self)(items)

    def as_precise_as(self, dtypes: Iterable[str]) -> Self:
        """Return the arrays, measured with the precision that a norm shared with these other dtypes needs."""
        if not self.only_halves or _OF_DTYPES[frozenset(dtypes).intersection(SUPPORTED)][-1]:
            return self
        # Only a norm of half types alone may add squares in float32. The other arrays need more precision.
        precise = copy.copy(self)
        precise.only_halves = False
        return precise

    def elements(self) -> int:
        """Return the total number of elements."""
        return sum(elements_of(x.shape) for x in self.items)

    def sharing(self, scope: Scope) -> int:
        """Return how many elements share a norm."""
        return self.elements() if scope.whole else sum(scope.elements(x.shape) for x in self.items)


def _follows_from(dtypes: frozenset[str]) -> tuple[frozenset[Format], bool, bool]:
    formats = frozenset(map(format_named, dtypes))
    halves = all(element.precision < FLOAT32.precision for element in formats)
    return formats, any(map(is_complex_name, dtypes)), halves


# Built in advance, because `torch.compile` cannot trace code that adds to a dict.
_OF_DTYPES = {
    frozenset(dtypes): _follows_from(frozenset(dtypes))
    for size in range(len(SUPPORTED) + 1)
    for dtypes in itertools.combinations(SUPPORTED, size)
}


def checked_dtype(array: A) -> A:
    """Return the array. Raises TypeError if its dtype is not supported for gradients."""
    if bare_name(array.dtype) not in SUPPORTED:
        check_dtypes([array], lambda: ["a gradient"])
    return array


def check_dtypes(arrays: Sequence[Any], names: Callable[[], Sequence[str]]) -> None:
    """Raise a TypeError that names the first array with an unsupported dtype."""
    if all(bare_name(dtype) in SUPPORTED for dtype in {x.dtype for x in arrays}):
        return
    # Names are computed only here, for the error: for many arrays that takes long.
    for x, name in zip(arrays, names(), strict=True):
        if dtype_name(x) not in SUPPORTED:
            advice = f"Convert it to one of {', '.join(SUPPORTED)}."
            if dtype_name(x).startswith("key<"):
                advice = "It is a key for random numbers, not a gradient: leave it out of the tree."
            raise TypeError(f"{name} has dtype {dtype_name(x)}, which cannot be clipped. {advice}")


def raise_named(take: Callable[[Any], object], leaves: Sequence[Any], names: Callable[[], Sequence[str]]) -> None:
    """After an error of `take`: raise a TypeError that names the first leaf that it refuses."""
    for leaf, name in zip(leaves, names(), strict=True):
        try:
            take(leaf)
        except TypeError as error:
            if hasattr(leaf, "dtype") and not is_quantized_name(dtype_name(leaf)):  # for those, `take` knows better
                check_dtypes([leaf], lambda name=name: [name])  # type: ignore[misc]
            raise TypeError(f"{name}: {error}") from error
