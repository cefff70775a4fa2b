"""`clipped_grad` turns a loss into the clipped sum of its per-example gradients; `clipped_fun` clips any result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gradclip._src.annotations import Method, Policy, RuleName, Thresholds, Unit, WideDtype
from gradclip._src.private.functions.clipped import ClippedFunction
from gradclip._src.private.functions.settings import made_of
from gradclip._src.private.sums.call_arguments import positions
from gradclip._src.public import public
from gradclip._src.words import with_advice


@public
@with_advice
def clipped_grad(
    fun: Callable[..., Any],
    max_norm: Thresholds,
    *,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    per_layer: bool = False,
    uniform: bool = True,
    to_unit: bool = False,
    keep_batch_dim: bool = True,
    return_values: bool = False,
    return_norms: bool = False,
    pre_clipping_transform: Callable[[Any], Any] | None = None,
    microbatch_size: int | str | None = None,
    pad_to: int | None = None,
    normalize_by: float = 1.0,
    sum_dtype: WideDtype | None = None,
    nonfinite: Policy = "drop",
    rule: RuleName = "clip",
    gamma: float = 0.01,
    grid: int | None = None,
    prng_argnum: int | None = None,
    unit: Unit = "example",
    method: Method = "auto",
) -> ClippedFunction:
    """Return a function that computes the sum over examples i of min(1, max_norm / ||g_i||) * g_i.

    Here g_i is the gradient of `fun` for example i. `rule` offers other factors than min(1, max_norm / ||g_i||).

    Call it like `fun`, with a batch in place of an example, and with `mask=` if the batch has padding. Write `fun` as
    for `jax.grad` or `torch.func.grad`: in PyTorch it takes a tree of parameters and uses `torch.func.functional_call`.
    The first differentiated argument decides the framework.

    Args:
        fun: a function that returns the scalar loss of one example, or of one group of examples.
        max_norm: the threshold C of each example, >= 0, in the units of the gradients. Or a tree that is a prefix of
            the gradients, as in `gradclip.per_example_clip`: the norms are then a tree with its structure.
        argnums: the position of the parameters. With several positions, their gradients share one norm.
        batch_argnums: the positions of the arguments that carry the batch, trees of arrays of shape (batch, ...). All
            other arguments go to every example whole. For `fun(params, x, y)`, pass `batch_argnums=(1, 2)`. If only
            one argument follows the parameters you can leave it out; it is then 1.
        has_aux: `fun` returns `(loss, aux)`. `aux`, a tree of arrays, is returned for each example.
        per_layer: clip each leaf by its own norm, as in `gradclip.per_example_clip`.
        uniform: how `per_layer` divides the threshold, as in `gradclip.per_example_clip`.
        to_unit: also divide by the threshold, so each example contributes at most 1, or 1 for each threshold of a tree.
            Not with `per_layer` or `grid`.
        keep_batch_dim: `fun` gets each example with a leading axis of length 1, which is removed from `aux` again. If
            False, `fun` gets the example without that axis. To clip whole groups, pass arrays of shape (groups,
            examples, ...), a loss for a batch, `keep_batch_dim=False` and `unit="group"`.
        return_values: also return the loss of each example.
        return_norms: also return the norm of each example before clipping.
        pre_clipping_transform: a function from the gradient of one example to the tree that is clipped, which may have
            another structure. It may scale or drop leaves, or make them smaller. `norms` are those of its results. The
            sensitivity holds for any such function of one gradient.
        microbatch_size: the number of examples in memory at a time; None for the whole batch. Any size works: the last
            microbatch is padded, so one program computes all of them. Or the bytes that their gradients may take, such
            as "512 MiB"; "auto" means "256 MiB". The size is then the most examples that fit, 1 or more, at most
            `pad_to`, or 256 without it. It depends on the parameters and `pad_to` alone, so one program still computes
            all batches. On several devices, sharding the whole batch works better than microbatches.
        pad_to: the largest batch you will pass. Smaller batches are padded to it with copies of the last example that
            contribute nothing, so one program computes every batch. The number of rows is rounded up to a multiple of
            8. With `microbatch_size`, only the last microbatch is padded, and `pad_to` just limits the batch. For
            what that promises about private sums, see `ClippedFunction.sensitivity`.
        normalize_by: the constant, > 0, that the sum and its sensitivity are divided by. It and its inverse must be
            normal numbers of float32, or of float64 with `sum_dtype="float64"`.
        sum_dtype: the dtype of the sum, as in `gradclip.per_example_clip`.
        nonfinite: the policy for an example with NaN or infinities, as in `gradclip.per_example_clip`. By default such
            an example contributes nothing.
        rule: "clip", "normalize" or "automatic", as in `gradclip.per_example_clip`.
        gamma: the constant of the rule "automatic", as in `gradclip.per_example_clip`.
        grid: the number of integer steps in `max_norm`, as in `gradclip.per_example_clip`. Sums are then int64, in
            steps. Give them to `gradclip.add_noise`, then multiply by max_norm / grid. The sensitivity's bound is for
            that product.
        prng_argnum: the position of a JAX key, or of a seed for TensorFlow's stateless functions. The example at place
            i gets `fold_in(key, i)`. To give each example a key of its own wherever it is, pass an array of keys as an
            argument in `batch_argnums`. PyTorch needs none: each example draws its own random numbers.
        unit: what one entry of the batch is, "example" or "group". The sensitivity is for one such unit.
        method: how the gradients are measured. The sums agree up to rounding.
            "materialize" makes the gradient of each example, all of a microbatch at once.
            "ghost" (JAX, PyTorch) makes none of a large parameter. It keeps what each product of matrices took in and
            the gradient of what it gave out: the factors. One forward and one backward pass make those of all
            examples, and the norms and the sum follow from them. Small parameters are made, and those that are only
            added to an example's values, such as biases and tables of positions. It is a ValueError if another
            parameter of 2^16 elements or more cannot be measured so, or if a setting needs gradients:
            `pre_clipping_transform`, `grid`, `nonfinite="zero"`.
            "auto" chooses for each parameter what takes the least time, and factors where gradients would take more
            than 1 GiB. Gradients are made where an operation is not known, if a setting needs them, in TensorFlow, and
            on devices without float64. `ClippedFunction.plan` says what is chosen, and why.
            "loop" computes one example after the other: in PyTorch with ordinary autograd, in JAX with `jax.lax.map`,
            in TensorFlow eagerly. Use it when `torch.func.vmap` fails: `.item()`, branches on values, buffers written
            in place, sparse gradients, backward hooks of modules. Recurrent layers and checkpointing need it too, but
            not under "auto" and "ghost". No sensitivity holds if `fun` writes in place what the next example reads.

    Returns:
        A `ClippedFunction`. It returns the clipped sum, with the structure of the parameters, in float32 or wider.
        With `has_aux`, `return_values` or `return_norms` it returns a pair: the sum and an `ExampleOutputs`. Its
        `sensitivity()` is what you scale the noise to.

    Raises:
        ValueError: a setting out of range. When called: batches without a common length, or larger than `pad_to`.
        TypeError: several arguments that may carry the batch, and no `batch_argnums`. When called: parameters in
        NumPy arrays, or a module or a generator of parameters instead of a tree.
        RuntimeError: when called: BatchNorm in training mode, or something `torch.func.vmap` cannot do.

    In PyTorch and TensorFlow the first call warns if `fun` does not use a parameter: the gradient is then zero.

    By factors a norm is measured from above, so each example is clipped to at most max_norm, as with "materialize". The
    sensitivity also counts what the sum of the factors rounds, which is proven to be at most 1.6e-5 max_norm for 256
    examples, whatever the network. Before the first call it assumes that gradients come in factors.

    Clipped sums are from Abadi et al. 2016, "Deep Learning with Differential Privacy". Norms from factors are from
    Goodfellow 2015, "Efficient Per-Example Gradient Computations", and Li et al. 2022, "Large Language Models Can Be
    Strong Differentially Private Learners"; sums from the same factors from Bu et al. 2023, "Differentially Private
    Optimization on Large Model at Small Cost".

    >>> import jax.numpy as jnp
    >>> def loss(w, x, y):
    ...     return jnp.sum(x @ w - y)
    >>> summed = clipped_grad(loss, max_norm=1.0, batch_argnums=(1, 2), pad_to=4)
    >>> x, y = jnp.array([[3.0, 4.0], [0.25, 0.5]]), jnp.ones(2)
    >>> print(summed(jnp.zeros(2), x, y).round(6))
    [0.85 1.3 ]
    >>> print(summed.sensitivity().bound, "for", summed.sensitivity().note[:51])
    1.0 for batches padded to 4 examples that keep their places

    """
    asked = locals()
    numbers = positions("argnums", argnums)
    both = sorted({*numbers} & {*positions("batch_argnums", 1 if batch_argnums is None else batch_argnums)})
    if both:
        said = "1, its default," if batch_argnums is None else batch_argnums
        raise ValueError(
            f"argnums={argnums} and batch_argnums={said} overlap in {both}: an argument that carries the batch cannot "
            "be differentiated. Pass parameters and batch as separate arguments, and batch_argnums= if it is not 1."
        )
    if prng_argnum is not None and prng_argnum in numbers:
        raise ValueError(f"prng_argnum={prng_argnum} is also in argnums={argnums}, but a key has no gradient.")
    return made_of(ClippedFunction, asked | {"argnums": numbers if isinstance(argnums, Iterable) else numbers[0]})


@public
@with_advice
def clipped_fun(
    fun: Callable[..., Any],
    max_norm: Thresholds,
    *,
    batch_argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    per_layer: bool = False,
    uniform: bool = True,
    to_unit: bool = False,
    keep_batch_dim: bool = True,
    return_norms: bool = False,
    microbatch_size: int | None = None,
    pad_to: int | None = None,
    normalize_by: float = 1.0,
    sum_dtype: WideDtype | None = None,
    nonfinite: Policy = "drop",
    rule: RuleName = "clip",
    gamma: float = 0.01,
    grid: int | None = None,
    prng_argnum: int | None = None,
    unit: Unit = "example",
    method: Method = "auto",
) -> ClippedFunction:
    """Return a function that computes the sum over examples i of min(1, max_norm / ||f_i||) * f_i, f_i = fun's result.

    It clips the tree of arrays that `fun` returns, such as statistics of an example or a client's update. Arguments,
    results and errors are otherwise those of `clipped_grad`. If you leave out `batch_argnums`, it is 0. There is no
    `argnums` and no `return_values`. `method` is "auto" or "materialize", which are the same here, or "loop": a result
    has no factors. The arrays in the arguments decide the framework: NumPy arrays run in JAX.

    >>> import jax.numpy as jnp
    >>> summed = clipped_fun(lambda x: x, max_norm=1.0, keep_batch_dim=False)
    >>> print(summed(jnp.array([[3.0, 4.0], [0.25, 0.5]])).round(6))
    [0.85 1.3 ]

    """
    return made_of(ClippedFunction, locals())
