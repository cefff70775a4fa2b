"""What a framework must do so that gradients come in factors."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from gradclip._src.private.batching.verbs import Args, Axes, Function
from gradclip._src.private.ghost.costs import Autograd
from gradclip._src.private.ghost.records import LeafUses, Tapped

Argnums = int | tuple[int, ...]


class Taps(ABC):
    """Find the uses of parameters in a function of one example, and run it over a batch.

    `fun` returns `(value, aux)` for one example. `axes` has 0 for each argument that carries the batch, else None. The
    parameters are the leaves of the arguments at `argnums`, one after another.
    """

    autograd: ClassVar[Autograd]
    """What gradients that the framework makes cost."""
    runs_more: ClassVar[bool] = False
    """Whether `run` can also run functions that the framework cannot run over a batch, with small parameters too."""

    def prevented(self) -> str:
        """Return why no function can be tapped where this is called, an empty text if functions can."""
        return ""

    @abstractmethod
    def uses(self, fun: Function, argnums: Argnums, args: Args, axes: Axes) -> list[LeafUses]:
        """Return how `fun` uses each parameter, from the shapes of the arguments alone."""

    def program(self, fun: Function, argnums: Argnums, args: Args, axes: Axes, *, traced_once: bool) -> str | None:
        """Return a text that is the same only if `fun` computes the same, or None if no text says that.

        With `traced_once`, the first call of some shapes decides what later ones compute. A framework that keeps no
        programs needs no text.
        """
        return ""

    @abstractmethod
    def run(
        self,
        fun: Function,
        argnums: Argnums,
        args: Args,
        axes: Axes,
        tapped: Sequence[bool],
        made_soon: Sequence[bool] = (),
    ) -> Tapped:
        """Run `fun` and its derivative over the batch. Parameters whose flag in `tapped` is True come in parts.

        `made_soon`: whether these parts will be multiplied for each example. If so, they may come as gradients.
        """
