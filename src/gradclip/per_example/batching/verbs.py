"""The operations a framework with derivatives supplies to turn a function of one example into one of a batch."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

from gradclip.core.values import Array
from gradclip.tree import flatten
from gradclip.typing import Mask

Step = Callable[[Sequence[Any], Any], tuple[Any, Any]]


class Programs(dict[Any, Any]):
    """Compiled programs for the calls of one function. A copy or pickle starts empty."""

    most = 64

    def keep(self, key: Any, program: Any) -> None:
        """Store a program. When full, the oldest is dropped, so that ever-changing shapes do not fill the memory."""
        while len(self) >= self.most:
            self.pop(next(iter(self)), None)
        self[key] = program

    def __reduce__(self) -> Any:
        # Compiled programs cannot be pickled, but the function that holds them should be.
        return Programs, ()


class Batching(Protocol):
    """A framework's batching operations."""

    keeps_whole_batches: bool
    """Whether `kept` is also used for batches without microbatches."""

    modules_called: str
    """How to call a module with given parameters, worded for a warning: "f(parameters) does"."""

    def with_gradient(self, fun: Callable[..., Any], argnums: int | tuple[int, ...]) -> Callable[..., Any]:
        """Return a function that returns `(gradient, (value, aux))` where `fun` returns `(value, aux)`."""

    def over_batch(
        self, fun: Callable[..., Any], axes: Sequence[int | None], spmd_axis_name: Hashable
    ) -> Callable[..., Any]:
        """Return `fun` mapped over axis 0 of the arguments whose entry in `axes` is 0."""

    def unused(
        self, fun: Callable[..., Any], args: Sequence[Any], axes: Sequence[int | None], summed: object
    ) -> list[str]:
        """Return the names of the parameters that a function with gradient does not use, as far as can be found out.

        `summed` is the result of the call. A parameter whose gradient is not all zeros is used.
        """

    def keys(self, key: object, count: int) -> Any:
        """Return the random keys of the places 0 to `count` - 1. Each depends on `key` and on its place alone."""

    def flags(self, mask: object) -> Any:
        """Return a mask as the framework's booleans."""

    def blanked(self, tree: object, mask: Array) -> Any:
        """Return `tree` with zeros in the rows outside the mask."""

    def cast(self, x: Array, dtype: Any) -> Any:
        """Return an array converted to another dtype."""

    def padded(
        self, args: Sequence[Any], axes: Sequence[int | None], mask: Array | None, count: int, size: int
    ) -> tuple[tuple[Any, ...], Any]:
        """Return the arguments, padded from `count` to `size` examples, and a mask without the padding.

        Padding repeats the last example, because a function may fail on examples that are not real, such as zeros.
        Only an empty batch is padded with zeros.
        """

    def at_once(self, step: Step, args: Sequence[Any], axes: Sequence[int | None], mask: Mask, count: int) -> Any:
        """Return `step(args, mask)`. For an empty batch, return zeros and results without rows."""

    def in_microbatches(
        self, step: Step, args: Sequence[Any], axes: Sequence[int | None], mask: Array | None, count: int, size: int
    ) -> tuple[Any, Any]:
        """Call `step(args, mask)` on `size` of the `count` examples at a time. The last ones are padded to `size`.

        Returns the sum of the first results, and the second results concatenated: trees with a row for each example.
        Trailing microbatches without an example in the mask are skipped; their rows are zeros.
        """

    def kept(
        self,
        programs: Programs,
        setting: object,
        run: Callable[..., Any],
        axes: Sequence[int | None],
        args: Sequence[Any],
    ) -> tuple[Any, list[Any]]:
        """Return `run(*args)`, a tree and a list of dtypes. Compile it once if the framework compiles.

        `setting` is everything the result depends on besides the arguments. `axes` is as in `over_batch`.
        """


def mapped(function: Callable[..., Any], tree: object, *others: object) -> Any:
    """Return the tree of `function`'s results, called with each leaf and the leaves at the same place in `others`."""
    flat = flatten(tree)
    rest = [flatten(other).leaves for other in others]
    return flat.rebuild([function(*leaves) for leaves in zip(flat.leaves, *rest, strict=True)])


def mapped_args(change: Callable[[Any], Any], args: Sequence[Any], axes: Sequence[int | None]) -> list[Any]:
    """Return the arguments, with `change` applied to the leaves of those that carry the batch."""
    return [arg if axis is None else mapped(change, arg) for arg, axis in zip(args, axes, strict=True)]
