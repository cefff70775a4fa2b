"""Default answers for frameworks with nothing special to offer: no kernels, no mesh, no multi-tensor calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from gradclip.core.memory import Region, any_overlap, meeting

if TYPE_CHECKING:
    from gradclip.core.arrays import Arrays
    from gradclip.core.formats import Format
    from gradclip.core.records import AtOnce
    from gradclip.core.values import Array


class Defaults:
    """Default implementations of the methods in `protocols`."""

    def precision(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def varies(self, value: object) -> bool:
        return False

    def plain(self, leaves: Sequence[Any]) -> bool:
        return False

    def together(self, arrays: Sequence[Any]) -> Hashable | None:
        return None

    def over(self, axis_name: Hashable) -> Any:
        raise TypeError(
            f"axis_name={axis_name!r} names axes of a mesh inside jax.shard_map, where all arrays are JAX arrays, but "
            "the arrays here are not. Leave it out for arrays of other frameworks."
        )

    def on_each_device(self, arrays: Arrays) -> Callable[..., Any] | None:
        return None

    def region(self, leaf: object) -> Region | None:
        """Return a gradient's region in memory, or None if it shares memory with no other writable gradient."""
        return None

    def meeting(self, leaves: Sequence[Any], owners: Sequence[Any]) -> list[list[int]]:
        return meeting(list(map(self.region, leaves)))

    def copied(self, leaf: Any) -> Any:
        raise NotImplementedError  # asked only of a gradient with a region

    def write_back(self, leaf: Any, copy: Any) -> None:
        raise NotImplementedError

    def can_write(self, leaves: Sequence[Any], arrays: Arrays) -> bool:
        return False

    def collide(self, leaves: Sequence[Any], arrays: Arrays) -> bool:
        regions = map(self.region, leaves)
        return any_overlap((region.address, region.end) for region in regions if region is not None)

    def patterns(self, leaves: Sequence[Any]) -> Sequence[Any]:
        return leaves

    def flushed_below(self, element: Format) -> float:
        return 0.0

    def at_most(self, arrays: Arrays, p: float, max_norm: float, part: tuple[Any, ...] | None = None) -> bool:
        raise NotImplementedError  # asked only about values in host memory

    def norm_at_once(self, arrays: Arrays, p: float) -> Array | None:
        return None

    def norms_of(self, arrays: Arrays, p: float) -> tuple[Array, Array | None] | None:
        return None

    def at_once(self, arrays: Arrays) -> AtOnce | None:
        return None
