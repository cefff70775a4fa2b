"""Where the elements of a view lie in a PyTorch parameter, from its sizes and strides."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch

from gradclip._src.private.ghost.records import MatrixPlace

# Views of ever-changing slices must not fill the memory.
_MOST_CHILDREN = 4096

Axes = tuple[int, ...]


class ViewLayout:
    """A view of a parameter of a given shape, whose strides are those of a contiguous parameter."""

    def __init__(self, shape: tuple[int, ...], twin: torch.Tensor) -> None:
        self.shape = shape
        self.twin = twin
        self.sizes = tuple(twin.shape)
        self.box = _box(shape, self.sizes, twin.stride(), twin.storage_offset())
        self._children: dict[Hashable, list[ViewLayout | None]] = {}
        self._places: dict[tuple[Axes, Axes, Axes], tuple[MatrixPlace, bool] | None] = {}

    def children(self, view: Callable[..., Any], args: Sequence[Any], key: Hashable) -> list[ViewLayout | None]:
        """Return the layouts of what `view` makes of this one: several for a split, None for what is no view."""
        found = self._children.get(key)
        if found is None:
            if len(self._children) >= _MOST_CHILDREN:
                self._children.clear()
            made = view(self.twin, *args)
            several = made if isinstance(made, tuple | list) else (made,)
            found = [self._child(one) for one in several]
            self._children[key] = found
        return found

    def split(self, sizes: Sequence[int]) -> ViewLayout | None:
        """Return the layout of the view of other sizes, None if it would be a copy."""
        return self.children(torch.Tensor.reshape, (tuple(sizes),), ("reshape", tuple(sizes)))[0]

    def _child(self, twin: torch.Tensor) -> ViewLayout | None:
        same_memory = twin.untyped_storage()._cdata == self.twin.untyped_storage()._cdata
        return ViewLayout(self.shape, twin) if same_memory else None

    def place(self, blocks: Axes, first: Axes, second: Axes) -> tuple[MatrixPlace, bool] | None:
        """Return the place of matrices whose axes are these of the view, None if there is none.

        Also returns whether the rows are the axes `first`. Rows are those with the first axis of the parameter, so
        that two uses of the same matrices have the same place.
        """
        key = blocks, first, second
        if key not in self._places:
            self._places[key] = None if self.box is None else _place(self.box, *key)
        return self._places[key]


@lru_cache(maxsize=4096)
def layout_of(shape: tuple[int, ...]) -> ViewLayout:
    """Return the layout of a whole parameter."""
    return ViewLayout(shape, torch.empty(shape, device="meta"))


class _Box:
    """The box that a view covers, as a reshape of which the view is a permutation; `axes` are those of each axis."""

    def __init__(self, start: Axes, stop: Axes, view: Axes, axes: tuple[Axes, ...]) -> None:
        self.start, self.stop, self.view, self.axes = start, stop, view, axes


def _box(shape: Axes, sizes: Axes, strides: Axes, offset: int) -> _Box | None:
    """Return the box of a strided view of a contiguous array; None if it covers no box, or an element twice."""
    if 0 in shape:
        return None
    steps = [1] * len(shape)
    for k in reversed(range(len(shape) - 1)):
        steps[k] = steps[k + 1] * shape[k + 1]
    pieces: list[list[tuple[int, int, int]]] = [[] for _ in shape]
    for dim, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        found = _pieces(shape, steps, size, stride)
        if found is None:
            return None
        for k, own_stride, own_size in found:
            pieces[k].append((own_stride, own_size, dim))
    start = tuple(offset // step % n for step, n in zip(steps, shape, strict=True))
    stop: list[int] = []
    view: list[int] = []
    axes: list[list[int]] = [[] for _ in sizes]
    for k, parts in enumerate(pieces):
        length = _length(parts, steps[k])
        if length is None or start[k] + length > shape[k]:
            return None
        stop.append(start[k] + length)
        for _, size, dim in sorted(parts, reverse=True):
            axes[dim].append(len(view))
            view.append(size)
    return _Box(start, tuple(stop), tuple(view), tuple(map(tuple, axes)))


def _length(parts: Sequence[tuple[int, int, int]], step: int) -> int | None:
    """Return how far pieces of an axis reach together, None if they leave gaps or meet an element twice."""
    expected = step
    for stride, size, _ in sorted(parts):
        if stride != expected:
            return None
        expected *= size
    return expected // step


def _pieces(shape: Axes, steps: Sequence[int], size: int, stride: int) -> list[tuple[int, int, int]] | None:
    """Split an axis of a view at the axes of the array: (axis, stride, size) of each piece of length 2 or more."""
    found = []
    while size > 1:
        k = next(
            (k for k, (n, step) in enumerate(zip(shape, steps, strict=True)) if n > 1 and 0 < step <= stride), None
        )
        if k is None or stride % steps[k]:
            return None
        room = steps[k] * shape[k] // stride
        whole = min(size, room)
        if whole < 2 or (size > room and (steps[k] * shape[k] % stride or size % room)):
            return None
        found.append((k, stride, whole))
        stride, size = stride * whole, size // whole
    return found


def _place(box: _Box, *roles: Axes) -> tuple[MatrixPlace, bool]:
    """Merge neighbors of the view that are neighbors in a role, so that equal places compare equal."""
    atoms = [[a for dim in role for a in box.axes[dim]] for role in roles]
    follows = {b for role in atoms for a, b in pairwise(role) if b == a + 1}
    view: list[int] = []
    index: dict[int, int] = {}
    for a, size in enumerate(box.view):
        if a in follows:
            view[-1] *= size
        else:
            index[a] = len(view)
            view.append(size)
    blocks, first, second = (tuple(index[a] for a in role if a in index) for role in atoms)
    swapped = (second or (len(view),)) < (first or (len(view),))
    rows, columns = (second, first) if swapped else (first, second)
    return MatrixPlace(box.start, box.stop, tuple(view), blocks, rows, columns), not swapped
