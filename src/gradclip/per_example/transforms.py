"""From a loss to the clipped sum of its per-example gradients, and from any function to that of its results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gradclip.per_example.call_arguments import positions
from gradclip.per_example.function import ClippedFunction
from gradclip.per_example.settings import PerExampleSettings
from gradclip.typing import Method, Policy, RuleName, Threshold, Unit, WideDtype
from gradclip.wording import with_advice


@with_advice
def clipped_grad(
    fun: Callable[..., Any],
    max_norm: Threshold,
    *,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    per_layer: bool = False,
    uniform: bool = True,
    keep_batch_dim: bool = True,
    return_values: bool = False,
    return_norms: bool = False,
    microbatch_size: int | None = None,
    pad_to: int | None = None,
    normalize_by: float = 1.0,
    sum_dtype: WideDtype | None = None,
    nonfinite: Policy = "skip",
    rule: RuleName = "clip",
    gamma: float = 0.01,
    grid: int | None = None,
    prng_argnum: int | None = None,
    unit: Unit = "example",
    method: Method = "vmap",
) -> ClippedFunction:
    """Return a function that computes the sum over examples i of min(1, max_norm / ||g_i||) * g_i, g_i = grad fun.

    It is called as `fun` is, with a batch in place of an example, and with `mask=` if some of it is padding. JAX
    (`fun` as for `jax.grad`) and PyTorch (as for `torch.func.grad`: a function of a tree of parameters, written
    with `torch.func.functional_call`) are told apart by the first differentiated argument.

    Args:
        fun: a loss, a scalar; of one example, or of one group of examples.
        max_norm: the threshold C of each example, >= 0, in the units of the gradients.
        argnums: the position of the parameters, or several, whose gradients share a norm.
        batch_argnums: the position of the batch, or several: trees of arrays of shapes (batch, ...). All other
            arguments go to every example as they are. It may be left out, for 1, where one argument follows the
            parameters; of `fun(params, x, y)` both x and y carry the batch: `batch_argnums=(1, 2)`.
        has_aux: `fun` returns `(loss, aux)`, `aux` a tree of arrays, which comes back for each example.
        per_layer: clip each leaf by its own norm, as in `gradclip.per_example_clip`.
        uniform: with `per_layer`, how the leaves share the threshold, as there.
        keep_batch_dim: `fun` gets the batch's arrays with a leading axis of length 1, which is taken off from `aux`
            again. If False, without it. A group is clipped as one unit where arrays of shape (groups, examples, ...)
            meet a loss of a batch and `keep_batch_dim=False`.
        return_values: also return the loss of each example.
        return_norms: also return the norm of each example before clipping.
        microbatch_size: how many examples are in memory at a time; None for all. It need not divide the batch: the
            last ones are padded to as many, so that one program computes all. Several devices share a batch better
            than they share its microbatches. For a sensitivity to one example more or less, 1 or a multiple of 8.
        pad_to: the most examples that a batch can have: smaller ones are padded to it with rows of zeros that add
            exactly nothing, so that one program of one shape computes all batches. (It has a multiple of 8 rows.)
        normalize_by: what the sum is divided by, > 0. The sensitivity is divided, too. It and its inverse are normal
            numbers of float32, or of float64 where `sum_dtype` says so.
        sum_dtype: of the sum, as in `gradclip.per_example_clip`.
        nonfinite: what happens to an example with NaN or infinities, as there: by default it contributes nothing.
        rule: "clip", or another way to bound an example, as there.
        gamma: the constant of the rule "automatic", as there.
        grid: how many steps of an integer grid `max_norm` has, as there: sums are then int64, in steps.
        prng_argnum: the position of a JAX key, or of a seed of TensorFlow's stateless functions, which is split into
            one for each example. In PyTorch each example draws random numbers of its own.
        unit: what one entry of the batch is, "example" or "group": the unit of the sensitivity.
        method: "vmap", or "loop", which takes the examples one after the other: in PyTorch by ordinary autograd, for
            what `torch.func.vmap` cannot do (recurrent layers, checkpointing, `.item()`, buffers written in place,
            sparse gradients), in JAX by `jax.lax.map`, in TensorFlow eagerly. What a loop writes in place the next
            example sees: no sensitivity covers that.

    Returns:
        A `ClippedFunction`, whose `sensitivity()` says what noise must be scaled to. It returns the clipped sum, of
        the structure of the parameters, in float32 at least; with `has_aux`, `return_values` or `return_norms` a pair
        of that and an `ExampleOutputs`.

    Raises:
        ValueError: a setting out of range. When called: batches without a common length, or larger than `pad_to`.
        TypeError: several arguments that may carry the batch, and no `batch_argnums`. When called: parameters in
        NumPy arrays, a module or a generator of parameters in place of a tree.
        RuntimeError: when called: BatchNorm in training mode; what `torch.func.vmap` cannot do.

    Where PyTorch's or TensorFlow's `fun` does not use a parameter, the first call warns: its gradient is zero.

    The method is that of Abadi et al. 2016, "Deep Learning with Differential Privacy".

    >>> import jax.numpy as jnp
    >>> def loss(w, x, y):
    ...     return jnp.sum(x @ w - y)
    >>> summed = clipped_grad(loss, max_norm=1.0, batch_argnums=(1, 2), pad_to=4)
    >>> print(summed(jnp.zeros(2), jnp.array([[3.0, 4.0], [0.25, 0.5]]), jnp.ones(2)).round(6))
    [0.85 1.3 ]
    >>> print(summed.sensitivity())
    sum over examples, add or remove one example: at most 1.0 (+ 4.8e-07 rounding); batches padded to 4 examples

    """
    numbers = positions("argnums", argnums)
    both = sorted({*numbers} & {*positions("batch_argnums", 1 if batch_argnums is None else batch_argnums)})
    if both:
        said = "1, its default," if batch_argnums is None else batch_argnums
        raise ValueError(
            f"argnums={argnums} and batch_argnums={said} overlap in {both}: an argument that carries the batch cannot "
            "be differentiated. Pass the parameters as an argument of their own, and batch_argnums= if it is not 1."
        )
    if prng_argnum is not None and prng_argnum in numbers:
        raise ValueError(f"prng_argnum={prng_argnum} is in argnums={argnums}, too: a key has no gradient.")
    return ClippedFunction(
        fun,
        PerExampleSettings(
            max_norm,
            per_layer=per_layer,
            uniform=uniform,
            nonfinite=nonfinite,
            rule=rule,
            gamma=gamma,
            sum_dtype=sum_dtype,
            grid=grid,
        ),
        numbers if isinstance(argnums, Iterable) else numbers[0],
        positions("batch_argnums", 1 if batch_argnums is None else batch_argnums),
        has_aux=has_aux,
        keep_batch_dim=keep_batch_dim,
        return_values=return_values,
        return_norms=return_norms,
        microbatch_size=microbatch_size,
        pad_to=pad_to,
        normalize_by=normalize_by,
        prng_argnum=prng_argnum,
        unit=unit,
        method=method,
        assumed=batch_argnums is None,
    )


@with_advice
def clipped_fun(
    fun: Callable[..., Any],
    max_norm: Threshold,
    *,
    batch_argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    per_layer: bool = False,
    uniform: bool = True,
    keep_batch_dim: bool = True,
    return_norms: bool = False,
    microbatch_size: int | None = None,
    pad_to: int | None = None,
    normalize_by: float = 1.0,
    sum_dtype: WideDtype | None = None,
    nonfinite: Policy = "skip",
    rule: RuleName = "clip",
    gamma: float = 0.01,
    grid: int | None = None,
    prng_argnum: int | None = None,
    unit: Unit = "example",
    method: Method = "vmap",
) -> ClippedFunction:
    """Return a function that computes the sum over examples i of min(1, max_norm / ||f_i||) * f_i, f_i = fun's result.

    Arguments, results and errors are those of `clipped_grad`, but what is clipped is the tree of arrays that `fun`
    returns: statistics of an example, the update of a client. PyTorch is used where an argument holds one of its
    tensors.

    >>> import jax.numpy as jnp
    >>> summed = clipped_fun(lambda x: x, max_norm=1.0, keep_batch_dim=False)
    >>> print(summed(jnp.array([[3.0, 4.0], [0.25, 0.5]])).round(6))
    [0.85 1.3 ]

    """
    return ClippedFunction(
        fun,
        PerExampleSettings(
            max_norm,
            per_layer=per_layer,
            uniform=uniform,
            nonfinite=nonfinite,
            rule=rule,
            gamma=gamma,
            sum_dtype=sum_dtype,
            grid=grid,
        ),
        None,
        positions("batch_argnums", 0 if batch_argnums is None else batch_argnums),
        has_aux=has_aux,
        keep_batch_dim=keep_batch_dim,
        return_norms=return_norms,
        microbatch_size=microbatch_size,
        pad_to=pad_to,
        normalize_by=normalize_by,
        prng_argnum=prng_argnum,
        unit=unit,
        method=method,
        assumed=batch_argnums is None,
    )
