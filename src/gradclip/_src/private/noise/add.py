"""`add_noise`: a clipped sum with Gaussian noise, drawn exactly on the integers or by a framework's generator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree

from gradclip._src.annotations import Tree
from gradclip._src.backends import any_distributed
from gradclip._src.backends.registry import being_compiled, entries_of, framework_of, is_traced, recording
from gradclip._src.core.formats import bare_name, dtype_name, format_named, is_empty_name
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.passed.leaves import first_sparse
from gradclip._src.private.batching.calls import ExampleOutputs
from gradclip._src.private.noise.discrete import EXACT
from gradclip._src.private.noise.exact import AskedNoise
from gradclip._src.private.sums.clip import PerExampleInfo
from gradclip._src.private.sums.sensitivity import Sensitivity
from gradclip._src.private.sums.settings import as_number
from gradclip._src.public import public
from gradclip._src.tree import FlatTree, flatten
from gradclip._src.words import shown

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_NOT_SUMS = (ExampleOutputs, PerExampleInfo)


def checked_multiplier(noise_multiplier: object) -> float:
    """Return a noise multiplier, rounded up to float64. Raises TypeError or ValueError for anything else."""
    multiplier = as_number("noise_multiplier", noise_multiplier)
    if not 0 < multiplier < float("inf"):
        raise ValueError(f"noise_multiplier must be positive and finite, got {noise_multiplier!r}.")
    return multiplier


@public
@with_subnormals
def add_noise(summed: Tree, sensitivity: Sensitivity, *, noise_multiplier: float, rng: object = "system") -> Tree:
    """Return a sum with Gaussian noise of standard deviation noise_multiplier * sensitivity in each element.

    Args:
        summed: the sum that one unit moves by at most `sensitivity`: an array or a tree of arrays, of one framework.
            int64 for a sum on a grid (`grid=`), else floats of any precision.
        sensitivity: a `gradclip.Sensitivity`, from `.sensitivity()` or `gradclip.clipped_sum_sensitivity`.
        noise_multiplier: the ratio of noise to sensitivity that accountants use, above 0.
        rng: "system" for exact noise from random bits of AES-256, with a key that the operating system draws for each
            call; from the operating system alone without the package cryptography. "urandom" for exact noise from the
            operating system's bits alone, which are slower. "opendp" for exact noise by OpenDP, by far the slowest. Or
            a generator of the arrays' framework: a `numpy.random.Generator`, a `torch.Generator`, a JAX key, a
            `tf.random.Generator`, a key of MLX.

    With "system", "urandom" and "opendp", integers plus discrete Gaussian noise are released, and the noise has exactly
    that distribution if the bits are uniform. "system" assumes that those of AES-256 cannot be told from such. "opendp"
    assumes nothing about floating point, the others IEEE 754, and without compiled kernels that NumPy's `exp` has a
    relative error below 2**-32. Sums on a grid stay integers: multiply the result by max_norm / grid, each with its own
    threshold if there are several. Floats are rounded to multiples of a step s first, a power of two that follows from
    the sensitivity and the number of elements; the noise is larger for it, by less than 2**-16. The result is a
    multiple of s, rounded to the dtype of the sum.

    With a framework's generator, noise is fast and works under `jax.jit`, but it is NOT PROVEN: its floating-point
    numbers are not normally distributed in their last bits, which can reveal the sum (Mironov 2012), and the generator
    may be predictable. Use it to try settings. It refuses sums on a grid.

    Inside `jax.jit` and `torch.compile`, exact noise is drawn anew at each run of the program, by a callback to the
    host; so what is computed again, as by checkpointing, has other noise. Devices that hold the same sum get the same
    noise: arrays on JAX meshes have it drawn once, and each part of a PyTorch distributed tensor is drawn by the first
    process that holds it. Where each process has a plain tensor of its own, draw on one, and send the result to the
    others.

    Raises:
        ValueError: a noise multiplier that is not positive and finite, a sensitivity that is infinite, unknown or 0, a
        grid so coarse that the noise has fewer than 64 steps; with exact noise, a sum inside of `jax.shard_map`,
        `torch.func.vmap` or `tf.function`, one that was cast to a narrower dtype than the sensitivity is for, one whose
        terms are still to be added over devices, JAX arrays of several processes outside of `jax.jit`, distributed
        tensors beside plain ones; with a generator, distributed tensors.
        TypeError: a sensitivity that is a number, an `rng` of another kind, leaves that are complex, sparse or
        integers of a float sum, outputs of single examples beside the sum. ModuleNotFoundError: "opendp" without
        OpenDP: pip install '.[private]' in a clone.

    Mironov 2012, "On Significance of the Least Significant Bits for Differential Privacy". Canonne et al. 2020, "The
    Discrete Gaussian for Differential Privacy".

    >>> import numpy as np
    >>> sensitivity = Sensitivity(
    ...     bound=1.0, unit="example", relation="add_or_remove_one"
    ... )
    >>> noised = add_noise(
    ...     np.zeros(3, np.float32), sensitivity, noise_multiplier=2.0, rng="system"
    ... )
    >>> steps = noised * 2**18  # s is 2**-17
    >>> noised.shape, noised.dtype, (steps == np.rint(steps)).all()
    ((3,), dtype('float32'), np.True_)
    """
    _check_sensitivity(sensitivity)
    multiplier = checked_multiplier(noise_multiplier)
    _check_sums_alone(summed)
    flat = flatten(summed)
    places, integers = _counted(flat, sensitivity)
    leaves = [flat.leaves[place] for place in places]
    if not isinstance(rng, str):
        noised = _by_generator(leaves, integers, sensitivity, multiplier, rng)
    elif rng in EXACT:
        noised = _exactly(leaves, integers, sensitivity, multiplier, rng)
    else:
        raise ValueError(
            f"rng must be 'system', 'urandom', 'opendp' or a generator of the arrays' framework, got {shown(rng)}."
        )
    found = dict(zip(places, noised, strict=True))
    return flat.rebuild(found.get(place, leaf) for place, leaf in enumerate(flat.leaves))


def is_recorded(leaves: Sequence[Any]) -> bool:
    """Say whether operations on these arrays are recorded, to run again later: noise and counts would not."""
    if being_compiled() or any(map(is_traced, leaves)):
        return True
    frameworks: list[Any] = list({id(found): found for found in map(framework_of, leaves)}.values())
    hidden = any(
        not framework.backend([leaf for leaf in leaves if framework_of(leaf) is framework], ()).visible
        for framework in frameworks
    )
    return hidden or recording() is not None


def _check_sensitivity(sensitivity: object) -> None:
    """Raise an error for anything but a finite, known `Sensitivity` above 0."""
    if not isinstance(sensitivity, Sensitivity):
        raise TypeError(
            f"sensitivity must be a gradclip.Sensitivity, got {shown(sensitivity)} of type "
            f"{type(sensitivity).__name__}. Take it from .sensitivity() of the clipped function, or from "
            "gradclip.clipped_sum_sensitivity(max_norm, batch_size=...)."
        )
    if not sensitivity.total:
        raise ValueError("the sensitivity is 0, so no noise would be added. Pass a positive max_norm.")


def _check_sums_alone(summed: object) -> None:
    """Raise a TypeError for what a clipped function returns beside its sum: the sensitivity is not for that."""
    nodes = optree.tree_leaves(summed, is_leaf=lambda node: isinstance(node, _NOT_SUMS))
    found = next((node for node in nodes if isinstance(node, _NOT_SUMS)), None)
    if found is not None:
        raise TypeError(
            f"the sum comes with {type(found).__name__}, which holds norms, values or counts of examples. The "
            "sensitivity does not bound them, so this noise would not hide them. Pass the sum alone: "
            "add_noise(result[0], ...)."
        )


def _counted(flat: FlatTree, sensitivity: Sensitivity) -> tuple[list[int], bool]:
    """Return the places of the leaves that hold numbers, and whether these are integers. Raise for other leaves."""
    sparse = first_sparse(flat)
    if sparse is not None:
        raise TypeError(
            f"{flat.paths()[sparse.place] or 'the sum'} is {sparse.kind}. Zeros need noise as well: make it dense by "
            f"{sparse.method}."
        )
    wanted = _FLOATS if sensitivity.in_steps is None else ("int64",)
    places = []
    for place, leaf in enumerate(flat.leaves):
        kind = dtype_name(leaf) if framework_of(leaf) is not None else type(leaf).__name__
        if kind in wanted:
            places.append(place)
        elif not is_empty_name(kind):
            raise TypeError(_wrong_kind(flat.paths()[place] or "the sum", kind, sensitivity))
    return places, sensitivity.in_steps is not None


def _wrong_kind(path: str, kind: str, sensitivity: Sensitivity) -> str:
    """Return the error for a leaf that is not of the kind that the sensitivity is for."""
    if sensitivity.in_steps is not None:
        return (
            f"this sensitivity is for a sum on a grid, of int64 arrays, but {path} is {kind}. Add the noise to the "
            "integers, then multiply by max_norm / grid."
        )
    if kind == "int64":
        return (
            f"{path} is int64, a sum on a grid, but this sensitivity is for a sum of floats. Take the sensitivity of "
            "the same function, or pass grid= to gradclip.clipped_sum_sensitivity."
        )
    advice = " Pass the real and the imaginary parts as two arrays." if "complex" in kind else ""
    return f"a sum must hold arrays of floats, but {path} is {kind}.{advice}"


def _check_not_narrowed(leaves: Sequence[Any], sensitivity: Sensitivity) -> None:
    """Raise a ValueError for sums that were rounded to a narrower dtype than the sensitivity is for.

    A sum of n units, rounded once, moves by up to that rounding of n times the bound, at both of two neighbors. A
    sensitivity that includes it has at least half of that in `rounding`.
    """
    units = sensitivity.batch_size or 0
    for name in {bare_name(leaf.dtype) for leaf in leaves} - {"float64"}:
        if sensitivity.rounding < format_named(name).roundoff * units * sensitivity.bound:
            raise ValueError(
                f"the sum is {name}, and this sensitivity is for sums in a wider dtype: rounding {units} units to "
                f"{name} moves them by more. Add the noise before the sum is cast, or pass "
                f"layout=gradclip.SumLayout(partial_sums_in='{name}') to .sensitivity() if sums are added up in it."
            )


def _by_generator(
    leaves: Sequence[Any], integers: bool, sensitivity: Sensitivity, multiplier: float, rng: object
) -> list[Any]:
    """Return the leaves with floating-point noise, by the framework's own generator."""
    if integers:
        raise TypeError(
            "noise for a sum on a grid is exact: pass rng='system'. A framework's generator draws floating-point "
            "numbers, which would undo what the grid is for."
        )
    if any_distributed(leaves):
        raise ValueError(
            "the sum is a distributed tensor, for which noise is exact: pass rng='system'. Each process has its own "
            "generator, and those that hold the same part would draw different noise."
        )
    std, noised = sensitivity.noise_std(multiplier), []
    frameworks = [framework_of(leaf) for leaf in leaves]
    if frameworks:
        framework: Any = frameworks[0]
        if any(other is not framework for other in frameworks):
            raise TypeError("one sum must hold arrays of one framework. Convert them, or add noise to each.")
        noised = framework.noised(leaves, std, rng)
        if noised is None:
            raise TypeError(
                f"rng must be 'system' or {framework.generator} for these arrays, got {shown(rng)} of type "
                f"{type(rng).__name__}."
            )
    return noised


def _exactly(
    leaves: Sequence[Any], integers: bool, sensitivity: Sensitivity, multiplier: float, source: str
) -> list[Any]:
    """Return the leaves with discrete Gaussian noise on integers, now or whenever a recorded program runs."""
    asked = AskedNoise(source, multiplier, sensitivity.total, sensitivity.in_steps)
    if not integers:
        _check_not_narrowed(leaves, sensitivity)
    if is_recorded(leaves):
        return _in_program(leaves, asked)
    if not all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves):
        raise ValueError(
            "the sum is on devices of several processes. Call add_noise inside of jax.jit: the first device has the "
            "noise drawn, and sends it to all."
        )
    if any_distributed(leaves):
        from gradclip._src.private.noise.torch import noise_on_parts

        return noise_on_parts(leaves, asked.of(leaves))
    return asked.of(leaves).added(leaves)


def _in_program(leaves: Sequence[Any], asked: AskedNoise) -> list[Any]:
    """Return recorded arrays plus noise that each run of the program draws. Raise ValueError where that cannot be."""
    called_back = _callback_for(leaves)
    if called_back is None:
        raise ValueError(
            f"rng={asked.source!r} draws outside of code that is recorded in this way. Return the sum from it, and "
            "call add_noise on that."
        )
    return called_back(leaves, asked)


# Each import is a statement: `torch.compile` cannot trace any other kind.
def _callback_for(leaves: Sequence[Any]) -> Callable[[Sequence[Any], AskedNoise], list[Any]] | None:
    modules = {entry.module for entry in entries_of(leaves)}
    if being_compiled():
        if modules != {"torch"}:
            return None
        from gradclip._src.private.noise.torch import called_back

        return called_back
    records = recording()
    if modules | ({records.module} if records else set()) | {"numpy"} == {"jax", "numpy"}:
        from gradclip._src.private.noise.jax import called_back

        return called_back
    return None
