"""`explain_spike` ranks the examples of a batch by the norms of their gradients, with the layers that make them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradclip._src.annotations import Mask, Method
from gradclip._src.backends.on_host import fetched, framework_of
from gradclip._src.monitor.records import rounded
from gradclip._src.private.functions.transforms import clipped_grad
from gradclip._src.private.sums.call_arguments import shapes_of_batch
from gradclip._src.public import public, record
from gradclip._src.tree import dotted, flatten
from gradclip._src.words import listed, with_advice

_SHOWN = 5  # examples
_ALL_ZERO = (
    "  All gradients are 0. If that is wrong: does the loss use the parameters that it is passed, and return no number "
    "that was read out of its array?"
)


@record
class LayerOfExample(NamedTuple):
    """A layer's norm in an example's gradient, and its share of the squared norm; NaN if that is not finite."""

    name: str
    norm: float
    share: float


@record
class Example(NamedTuple):
    """An example of a batch.

    Attributes:
        place: where it is on axis 0 of the batch, from 0.
        norm: the norm of the gradient of its loss.
        times: the norm, divided by the median of the finite norms of the batch.
        loss: its loss.
        layers: its layers, the largest first; those that are not finite before the others.

    """

    place: int
    norm: float
    times: float
    loss: float
    layers: tuple[LayerOfExample, ...]

    @property
    def finite(self) -> bool:
        """Whether its norm is finite."""
        return math.isfinite(self.norm)

    def __str__(self) -> str:
        if self.finite:
            name, _, share = self.layers[0] if self.layers else ("no layer", 0.0, math.nan)
            times = "" if math.isnan(self.times) else f", {rounded(self.times)} times the median"
            shares = "" if math.isnan(share) else f", {share:.0%} of its square from {name}"
            return f"example {self.place}: norm {self.norm:.4g}{times}{shares}, loss {self.loss:.4g}"
        broken = [layer.name for layer in self.layers if not math.isfinite(layer.norm)]
        more = f" and {len(broken) - 1:,} more" if len(broken) > 1 else ""
        return f"example {self.place}: norm {self.norm:g}, not finite in {broken[0]}{more}, loss {self.loss:.4g}"


@public
class SpikeExplanation(NamedTuple):
    """The examples of a batch: those with NaN or infinity first, then by the norms of their gradients.

    Attributes:
        examples: the examples, ranked.
        median: the median of the finite norms; NaN without any.

    Print it for the first five. The norms reveal single examples: keep them out of private training.
    """

    examples: tuple[Example, ...]
    median: float

    def __str__(self) -> str:
        told = f"{len(self.examples):,} examples, median norm {self.median:.4g}"
        broken = sum(not example.finite for example in self.examples)
        heading = f"{told}, {broken:,} not finite" if broken else told
        zeros = [_ALL_ZERO] if self.examples and not any(example.norm for example in self.examples) else []
        return "\n".join([heading, *zeros, *(f"  {example}" for example in self.examples[:_SHOWN])])


@public
@with_advice
def explain_spike(
    fun: Callable[..., Any],
    params: Any,
    *,
    batch: Any,
    batch_argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    keep_batch_dim: bool = True,
    microbatch_size: int | None = 8,
    prng_argnum: int | None = None,
    method: Method = "materialize",
    mask: Mask = None,
) -> SpikeExplanation:
    """Return the examples of a batch, ranked by the norms ||g_i|| of their gradients, each with its layers.

    Here g_i is the gradient of `fun` for example i. Call it with the batch of a spike: one bad example stands out.
    `gradclip.clipped_grad` computes the gradients, in JAX, PyTorch and TensorFlow.

    Args:
        fun: a loss: a function of the parameters and one example that returns its scalar loss, as in `clipped_grad`: in
            PyTorch it takes a tree of parameters and uses `torch.func.functional_call`.
        params: the parameters, a tree of arrays; in PyTorch `dict(model.named_parameters())`.
        batch: an array, or another tree of arrays, of shape (batch, ...). A tuple or a list stands for several
            arguments: `loss(params, x, y)` takes the batch `(x, y)`.
        batch_argnums: the positions of those arguments that carry the batch, from 1, as in `clipped_grad`; None for
            all. The others go to every example whole.
        has_aux: `fun` returns `(loss, aux)`.
        keep_batch_dim: `fun` gets each example with a leading axis of length 1, as in `clipped_grad`.
        microbatch_size: the number of examples in memory at a time, each with a gradient of its own; None for all.
        prng_argnum: the position of a key, as in `clipped_grad`.
        method: "materialize" or "loop", as in `clipped_grad`. Pass "loop" if `torch.func.vmap` fails.
        mask: booleans of shape (batch,). An example with False is left out.

    Returns:
        A `SpikeExplanation`: `examples`, ranked, each with `place`, `norm`, `times` the median, `loss` and `layers`.

    Raises:
        TypeError, ValueError, RuntimeError: as `clipped_grad` and the function that it returns. TypeError: `fun` does
        not take as many arguments as the batch has, or the call is traced by JAX.

    The parameters do not change. Memory: `microbatch_size` gradients.

    >>> import jax.numpy as jnp
    >>> def loss(params, x, y):
    ...     return jnp.sum((x @ params["w"] - y) ** 2) / 2
    >>> x = jnp.array([[3.0, 4.0], [0.6, 0.8], [30.0, 40.0]])
    >>> print(explain_spike(loss, {"w": jnp.zeros(2)}, batch=(x, jnp.ones(3))))
    3 examples, median norm 5
      example 2: norm 50, 10 times the median, 100% of its square from w, loss 0.5
      example 0: norm 5, 1 times the median, 100% of its square from w, loss 0.5
      example 1: norm 1, 0.2 times the median, 100% of its square from w, loss 0.5

    """
    arguments = tuple(batch) if type(batch) in (tuple, list) else (batch,)
    every = [number for number in range(1, len(arguments) + 1) if number != prng_argnum]
    measured = clipped_grad(
        fun,
        1.0,
        batch_argnums=every if batch_argnums is None else batch_argnums,
        has_aux=has_aux,
        per_layer=True,
        keep_batch_dim=keep_batch_dim,
        return_values=True,
        return_norms=True,
        microbatch_size=microbatch_size,
        prng_argnum=prng_argnum,
        method=method,
    )
    _check_call(fun, params, batch, arguments, measured.batch_argnums)
    _, outputs = measured(params, *arguments, mask=mask)
    flat = flatten(outputs.norms)
    losses, *columns = _on_host([outputs.values, *flat.leaves])
    table = np.array(columns).reshape(len(columns), len(losses)).T
    kept = np.arange(len(losses)) if mask is None else np.flatnonzero(_on_host([mask])[0])
    return _ranked(table[kept], losses[kept], dotted(tuple(flat.paths())), kept.tolist())


def _check_call(
    fun: Callable[..., Any], params: Any, batch: Any, arguments: Sequence[Any], carriers: Sequence[int]
) -> None:
    """Raise a ValueError if an argument is not a batch of arrays, a TypeError if the loss does not take so many."""
    shapes_of_batch([None, *(arg if place in carriers else None for place, arg in enumerate(arguments, 1))])
    try:
        inspect.signature(getattr(fun, "forward", fun)).bind(params, *arguments)
    except ValueError:
        return  # some functions show no signature
    except TypeError as error:
        raise TypeError(
            f"the loss does not take the parameters and {_counted(batch, arguments)}: {error}. Write it as "
            "loss(params, x, y) for the batch (x, y), and as loss(params, batch) for a dict or an array."
        ) from error


def _counted(batch: Any, arguments: Sequence[Any]) -> str:
    """Say what a batch is, and how many arguments that makes."""
    kind = f"a {type(batch).__name__}"
    if isinstance(batch, Mapping):
        return f"the batch, {kind} with the keys {listed([*batch])} that counts as one argument"
    if arguments and arguments[0] is batch:
        return f"the batch, {kind} that counts as one argument"
    return f"the batch, {kind} of {len(arguments)} arguments"


def _on_host(values: Sequence[Any]) -> list[np.ndarray]:
    for value in values:
        framework = framework_of(value)
        if framework.is_traced(value):
            raise TypeError("explain_spike needs values, got a traced array. Call it outside the compiled function.")
    return fetched(values)


def _ranked(norms: np.ndarray, losses: np.ndarray, names: Sequence[str], places: Sequence[int]) -> SpikeExplanation:
    """Rank examples by the norms of their layers, an array (examples, layers)."""
    scales = np.max(norms, axis=1, initial=0.0, where=np.isfinite(norms))
    scales[scales == 0] = 1.0
    with np.errstate(invalid="ignore"):
        squares = (norms / scales[:, None]) ** 2
        totals = squares.sum(axis=1)
        each = np.sqrt(totals) * scales
        shares = np.where(np.isfinite(totals) & (totals > 0), 1.0, np.nan)[:, None] * squares / totals[:, None]
    finite = np.isfinite(each)
    median = float(np.median(each[finite])) if finite.any() else math.nan
    examples = []
    for row in np.lexsort((-np.where(finite, each, 0.0), finite)).tolist():
        order = np.argsort(-np.where(np.isfinite(norms[row]), norms[row], np.inf), kind="stable").tolist()
        layers = tuple(LayerOfExample(names[i], float(norms[row, i]), float(shares[row, i])) for i in order)
        times = float(each[row]) / median if median > 0 else math.nan
        examples.append(Example(places[row], float(each[row]), times, float(losses[row]), layers))
    return SpikeExplanation(tuple(examples), median)
