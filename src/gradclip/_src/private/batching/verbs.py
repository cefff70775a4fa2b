"""The operations a framework with derivatives supplies to turn a function of one example into one of a batch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

from gradclip._src.tree import flatten

Args = Sequence[Any]
Axes = Sequence[int | None]  # for each argument 0 if it carries the batch, else None
Function = Callable[..., Any]
Transform = Callable[[Any], Any]
Step = Callable[[Args, Any], tuple[Any, Any]]
Made = tuple[Any, list[Any]]  # a tree of arrays, and a list of dtypes
Run = Callable[..., Made]

# Values of these types cannot change, so they may be part of a program's key.
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))


class NoLossError(ValueError):
    """A function to differentiate has returned something else than one number for an example."""

    def __init__(self, got: str) -> None:
        super().__init__(f"the loss must return one number for each example, got {got}")


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


class Batching(ABC):
    """A framework's batching operations."""

    keeps_whole_batches: ClassVar[bool] = False
    """Whether `kept` is also used for batches without microbatches."""

    modules_called: ClassVar[str]
    """How to call a module with given parameters, worded for a warning: "f(parameters) does"."""

    @abstractmethod
    def with_gradient(self, fun: Function, argnums: int | tuple[int, ...], transform: Transform | None) -> Function:
        """Return a function that returns `(gradient, (value, aux))` where `fun` returns `(value, aux)`.

        `transform` is applied to the gradient of each example.
        """

    @abstractmethod
    def over_batch(self, fun: Function, axes: Axes, spmd_axis_name: Hashable) -> Function:
        """Return `fun` mapped over axis 0 of the arguments whose entry in `axes` is 0."""

    def unused(self, fun: Function, args: Args, axes: Axes, summed: object) -> list[str]:
        """Return the names of the parameters that a function with gradient does not use, as far as can be found out.

        `summed` is the result of the call. A parameter whose gradient is not all zeros is used.
        """
        return []

    @abstractmethod
    def keys(self, key: object, count: int) -> Any:
        """Return the random keys of the places 0 to `count` - 1. Each depends on `key` and on its place alone."""

    @abstractmethod
    def flags(self, mask: object) -> Any:
        """Return a mask as the framework's booleans."""

    @abstractmethod
    def blanked(self, tree: object, mask: Any) -> Any:
        """Return `tree` with zeros in the rows outside the mask."""

    @abstractmethod
    def padded(self, args: Args, axes: Axes, mask: Any, count: int, size: int) -> tuple[tuple[Any, ...], Any]:
        """Return the arguments, padded from `count` to `size` examples, and a mask without the padding.

        Padding repeats the last example, because a function may fail on examples that are not real, such as zeros.
        Only an empty batch is padded with zeros.
        """

    def at_once(self, step: Step, args: Args, axes: Axes, mask: Any, count: int) -> Any:
        """Return `step(args, mask)`. For an empty batch, return zeros and results without rows."""
        if count:
            return step(args, mask)
        summed, outputs = step(*self.padded(args, axes, None, 0, 1))
        return summed, mapped(lambda x: x[:0], outputs)

    @abstractmethod
    def in_microbatches(self, step: Step, args: Args, axes: Axes, mask: Any, count: int, size: int) -> tuple[Any, Any]:
        """Call `step(args, mask)` on `size` of the `count` examples at a time. The last ones are padded to `size`.

        Returns the sum of the first results, and the second results concatenated: trees with a row for each example.
        Trailing microbatches without an example in the mask are skipped; their rows are zeros.
        """

    def kept(self, programs: Programs, setting: object, run: Run, axes: Axes, args: Args) -> Made:
        """Return `run(*args)`. Compile it once if the framework compiles.

        `setting` is everything the result depends on besides the arguments. `axes` is as in `over_batch`.
        """
        return run(*args)


def transformed(call: Function, transform: Transform | None) -> Function:
    """Return a function that returns `(gradient, kept)`, with the gradient transformed."""
    if transform is None:
        return call

    def changed(*args: object) -> Any:
        gradient, kept = call(*args)
        return transform(gradient), kept

    return changed


def named(x: object) -> Hashable | None:
    """Return a value that equals another one only if both mean the same; None if `x` may change."""
    # Types and `repr` tell apart 1, 1.0 and True, and 0.0 and -0.0, which compare equal.
    if isinstance(x, _CONSTANTS):
        return type(x), repr(x) if isinstance(x, int | float | complex) else x
    try:
        hash(x)
    except TypeError:
        return None
    return (type(x), x) if callable(x) else None


def mapped(function: Function, tree: object, *others: object) -> Any:
    """Return the tree of `function`'s results, called with each leaf and the leaves at the same place in `others`."""
    flat = flatten(tree)
    rest = [flatten(other).leaves for other in others]
    return flat.rebuild([function(*leaves) for leaves in zip(flat.leaves, *rest, strict=True)])


def mapped_args(change: Callable[[Any], Any], args: Args, axes: Axes) -> list[Any]:
    """Return the arguments, with `change` applied to the leaves of those that carry the batch."""
    return [arg if axis is None else mapped(change, arg) for arg, axis in zip(args, axes, strict=True)]
