"""What turns a function of one example into one of a batch: the verbs that a framework with derivatives supplies."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

from gradclip.backends.values import Array
from gradclip.tree import flatten
from gradclip.typing import Mask

Step = Callable[[Sequence[Any], Any], tuple[Any, Any]]


class Programs(dict[Any, Any]):
    """What was compiled for calls of one function; a copy starts without."""

    most = 64

    def keep(self, key: Any, program: Any) -> None:
        """Keep one more. The oldest goes first: a caller whose shapes always change must not fill the memory."""
        while len(self) >= self.most:
            self.pop(next(iter(self)), None)
        self[key] = program

    def __reduce__(self) -> Any:
        # Compiled programs cannot be pickled, but a function that keeps them may be sent to another process.
        return Programs, ()


class Batching(Protocol):
    """The verbs."""

    keeps_whole_batches: bool
    """Whether `kept` is for batches that are taken at once, too, not only for microbatches."""

    modules_called: str
    """What calls a module with parameters that are given, as a warning says it: "f(parameters) does"."""

    def with_gradient(self, fun: Callable[..., Any], argnums: int | tuple[int, ...]) -> Callable[..., Any]:
        """Return a function that returns `(gradient, (value, aux))` where `fun` returns `(value, aux)`."""

    def over_batch(
        self, fun: Callable[..., Any], axes: Sequence[int | None], spmd_axis_name: Hashable
    ) -> Callable[..., Any]:
        """Return `fun` over axis 0 of those arguments that `axes` has a 0 for."""

    def unused(
        self, fun: Callable[..., Any], args: Sequence[Any], axes: Sequence[int | None], summed: object
    ) -> list[str]:
        """Return the names of the parameters that a function with gradient does not use, as far as one can tell.

        `summed` is what came out: what is not all zeros is used.
        """

    def split_key(self, key: object, count: int) -> Any:
        """Return `count` keys for random numbers, made of one."""

    def flags(self, mask: object) -> Any:
        """Return a mask as booleans of the framework."""

    def blanked(self, tree: object, mask: Array) -> Any:
        """Return `tree`, zero in the rows that are not in the mask."""

    def cast(self, x: Array, dtype: Any) -> Any:
        """Return an array in another dtype."""

    def padded(
        self, args: Sequence[Any], axes: Sequence[int | None], mask: Array | None, count: int, size: int
    ) -> tuple[tuple[Any, ...], Any]:
        """Return the arguments with `size` examples, those beyond `count` zeros, and a mask that leaves these out."""

    def at_once(self, step: Step, args: Sequence[Any], axes: Sequence[int | None], mask: Mask, count: int) -> Any:
        """Return `step(args, mask)`; of no examples, zeros and no rows."""

    def in_microbatches(
        self, step: Step, args: Sequence[Any], axes: Sequence[int | None], mask: Array | None, count: int, size: int
    ) -> tuple[Any, Any]:
        """Call `step(args, mask)` with `size` of the `count` examples at a time, the last ones padded to as many.

        Returns the sum of its first results, and its second ones put together: trees with a row for each example,
        zeros for trailing microbatches of which the mask holds no example, which are skipped.
        """

    def kept(
        self,
        programs: Programs,
        setting: object,
        run: Callable[..., Any],
        axes: Sequence[int | None],
        args: Sequence[Any],
    ) -> tuple[Any, list[Any]]:
        """Return `run(*args)`, a tree and a list of dtypes, compiled once where the framework compiles.

        `setting` is what the result depends on besides the arguments; `axes` are as in `over_batch`.
        """


def mapped(function: Callable[..., Any], tree: object, *others: object) -> Any:
    """Return the tree of what `function` makes of each leaf, and of those of `others` at its place."""
    flat = flatten(tree)
    rest = [flatten(other).leaves for other in others]
    return flat.rebuild([function(*leaves) for leaves in zip(flat.leaves, *rest, strict=True)])


def mapped_args(change: Callable[[Any], Any], args: Sequence[Any], axes: Sequence[int | None]) -> list[Any]:
    """Return the arguments, changed leaf by leaf where they carry the batch."""
    return [arg if axis is None else mapped(change, arg) for arg, axis in zip(args, axes, strict=True)]
