"""What a framework must do so that gradients come in factors: taps, and matrix products in float64 for their sums."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

from gradclip._src.core.values import Array
from gradclip._src.private.batching.verbs import Args, Axes, Function
from gradclip._src.private.ghost.plan import Autograd
from gradclip._src.private.ghost.records import Dense, Embedding, LeafUses, Tapped

Argnums = int | tuple[int, ...]


class NotInFactorsError(RuntimeError):
    """A function did something by which gradients in factors would be wrong: they must be made."""


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
        Raises NotInFactorsError where factors would be wrong.
        """


class Squares(NamedTuple):
    """Of each example, shape (batch,): the square |G|**2 with an error, and M**2 as in `certificate`, over blocks."""

    square: Array
    size: Array


class Products(ABC):
    """Products of one framework. Numbers narrower than float64 are widened exactly. NaN and infinities give NaN."""

    xp: ModuleType
    """The array API standard's operations on the framework's own arrays."""

    @abstractmethod
    def __init__(self, *, concrete: bool) -> None:
        """`concrete`: the backend computes with NumPy's arrays in the place of the framework's own."""

    @abstractmethod
    def precision(self) -> AbstractContextManager[Any]:
        """Return the context in which float64 can be used."""

    @abstractmethod
    def dense(self, terms: Dense) -> Squares:
        """Return sum_ts <left_t, left_s> <right_t, right_s> and (sum_t |left_t| |right_t|)**2, added over blocks."""

    @abstractmethod
    def embedding(self, terms: Embedding) -> Squares:
        """Return sum_ts [index_t = index_s] <right_t, right_s> and (sum_t |right_t|)**2."""

    @abstractmethod
    def between(self, dense: Dense, rows: Embedding) -> Array:
        """Return sum_ts left_s[index_t] <right_t, right_s> for terms t of an embedding and s of a product."""

    @abstractmethod
    def made(self, rows: Array) -> Array:
        """Return the sum of squares of each row of gradients of shape (batch, ...)."""

    @abstractmethod
    def multiplied(self, terms: Dense) -> Array:
        """Return sum_t left_t right_t^T, shape (batch, blocks, rows, columns), in at least float32."""

    @abstractmethod
    def joined(self, terms: list[Dense]) -> Dense:
        """Return the terms of several products as one."""

    @abstractmethod
    def joined_rows(self, terms: list[Embedding]) -> Embedding:
        """Return the terms of several embeddings as one."""

    @abstractmethod
    def exponents(self, x: Array) -> Array:
        """Return, for each example, the k for which the largest magnitude is in [2**(k - 1), 2**k), as float64.

        It is 0 for zeros, NaN and infinities.
        """

    @abstractmethod
    def times_power(self, x: Array, exponents: Array) -> Array:
        """Return an array with each example times 2**exponents, in float64. Products are exact, or underflow."""

    @abstractmethod
    def sum_dense(self, terms: Dense, weights: Array) -> Array:
        """Return sum_i w_i sum_t left_it right_it^T, shape (blocks, rows, columns). Weight 0 adds exactly nothing."""

    @abstractmethod
    def sum_rows(self, terms: Embedding, weights: Array, rows: int) -> Array:
        """Return the same for an embedding, shape (1, rows, columns)."""

    @abstractmethod
    def sum_made(self, rows: Array, weights: Array) -> Array:
        """Return the weighted sum of gradients of shape (batch, ...)."""

    @abstractmethod
    def placed(self, part: Array, view: tuple[int, ...], order: tuple[int, ...], box: tuple[int, ...]) -> Array:
        """Return numbers in the shape `box`: `part` has the axes `order` of `view`, which is `box` reshaped."""

    @abstractmethod
    def put(self, part: Array, start: tuple[int, ...], shape: tuple[int, ...]) -> Array:
        """Return zeros of a shape with a box of numbers from `start` on."""

    @abstractmethod
    def rounded(self, total: Array, dtype: str) -> Array:
        """Return a sum in a dtype, rounded to nearest."""

    @abstractmethod
    def after(self, vector: Array, other: Array) -> Array:
        """Return a vector that a compiler may not use before it has the other array."""

    @abstractmethod
    def given(self, vector: Array) -> Array:
        """Return a vector as the backend of the examples computes with it."""

    @abstractmethod
    def taken(self, vector: Array) -> Array:
        """Return a vector of that backend as these products take it."""
