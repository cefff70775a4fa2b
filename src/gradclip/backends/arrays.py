"""The arrays that share a norm, and what is known of them together."""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from gradclip.backends.formats import FLOAT32, SUPPORTED, Format, bare_name, dtype_name, format_named, is_complex_name
from gradclip.backends.values import elements_of

if TYPE_CHECKING:
    from gradclip.backends.values import Array, Scope


A = TypeVar("A", bound="Array")


class Arrays(Sequence[Any]):
    """A list of a backend's arrays, the names of their dtypes and the formats of the real numbers in them."""

    dtypes: frozenset[str]
    formats: frozenset[Format]
    any_complex: bool  # whether one holds complex numbers
    only_halves: bool  # whether a norm of them needs no more precision than float32's
    at_once: Any = None  # what a backend's `at_once` found

    def __init__(self, items: Sequence[Any], dtypes: Iterable[str] | None = None) -> None:
        self._given = items
        self.dtypes = frozenset(map(bare_name, {x.dtype for x in items}) if dtypes is None else dtypes)
        self.formats, self.any_complex, self.only_halves = _OF_DTYPES[self.dtypes]

    @property
    def sources(self) -> Sequence[Any]:
        """The arrays as they were given."""
        return self._given

    @property
    def items(self) -> Sequence[Any]:
        """The arrays one by one."""
        return self._given

    def __len__(self) -> int:
        return len(self._given)

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]

    # Compilers that follow Python code do not all know that `Sequence` ends at an IndexError.
    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def alike(self, items: Sequence[Any]) -> Self:
        """Return other arrays that are read as these are."""
        return type(self)(items)

    def as_precise_as(self, dtypes: Iterable[str]) -> Self:
        """Return the arrays, to be measured as precisely as their norm together with others of these dtypes."""
        if not self.only_halves or _OF_DTYPES[frozenset(dtypes).intersection(SUPPORTED)][-1]:
            return self
        # Squares of half types alone may be added in float32. The others of this norm need more than that.
        precise = copy.copy(self)
        precise.only_halves = False
        return precise

    def elements(self) -> int:
        """Return the number of elements."""
        return sum(elements_of(x.shape) for x in self.items)

    def sharing(self, scope: "Scope") -> int:
        """Return how many elements share a norm."""
        return self.elements() if scope.whole else sum(scope.elements(x.shape) for x in self.items)


def _follows_from(dtypes: frozenset[str]) -> tuple[frozenset[Format], bool, bool]:
    formats = frozenset(map(format_named, dtypes))
    halves = all(element.precision < FLOAT32.precision for element in formats)
    return formats, any(map(is_complex_name, dtypes)), halves


# Made beforehand: `torch.compile` cannot follow code that adds to it.
_OF_DTYPES = {
    frozenset(dtypes): _follows_from(frozenset(dtypes))
    for size in range(len(SUPPORTED) + 1)
    for dtypes in itertools.combinations(SUPPORTED, size)
}


def checked_dtype(array: A) -> A:
    """Return the array. Raises TypeError where its dtype cannot hold clipped gradients."""
    if bare_name(array.dtype) not in SUPPORTED:
        check_dtypes([array], lambda: ["a gradient"])
    return array


def check_dtypes(arrays: Sequence[Any], names: Callable[[], Sequence[str]]) -> None:
    """Raise a TypeError that names the first array whose dtype cannot hold clipped gradients."""
    if all(bare_name(dtype) in SUPPORTED for dtype in {x.dtype for x in arrays}):
        return
    # Only now: names are made for errors alone, and for many arrays that takes long.
    for x, name in zip(arrays, names(), strict=True):
        if dtype_name(x) not in SUPPORTED:
            raise TypeError(
                f"{name} has dtype {dtype_name(x)}, which cannot be clipped; convert it to one of "
                f"{', '.join(SUPPORTED)}."
            )
