"""The value of one example that `gradclip.integrations.jax_privacy` clips, also on a grid; and what its sums return."""

import math
import numbers
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from importlib import metadata
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp

from gradclip._src.annotations import Threshold, Thresholds, Tree
from gradclip._src.functional.clip import global_norm
from gradclip._src.passed.arguments import is_single_threshold
from gradclip._src.passed.leaves import as_floats, counted
from gradclip._src.private.functions.clipped import ClippedFunction
from gradclip._src.private.sums.clip import clip_examples
from gradclip._src.private.sums.rounding import root_up, rounded_up
from gradclip._src.private.sums.settings import PerExampleSettings, check_grid
from gradclip._src.public import public_in
from gradclip._src.words import with_advice


@public_in("integrations.jax_privacy")
@with_advice
def clip_and_round_to_grid(gradient: Tree, l2_clip_norm: Threshold, grid_scale: int) -> tuple[Tree, Any]:
    """Clip the gradient of one example and round it to integers, with an L2 norm of at most `grid_scale`.

    The integers times l2_clip_norm / grid_scale are the clipped gradient. To leave room for the rounding, a gradient
    of D elements is clipped to sqrt(D) / 2 steps less. One with NaN or infinities becomes zeros.

    Args:
        gradient: a tree of JAX arrays.
        l2_clip_norm: the threshold, > 0 and finite.
        grid_scale: the number of steps in the threshold.

    Returns:
        `(rounded, norm)`: int64 integers, and the norm before clipping.

    Raises:
        ValueError: a grid too coarse for the number of elements, or 64-bit mode is off.

    The signature is that of jax-privacy 2.2.

    >>> with jax.enable_x64(True):
    ...     x = jax.numpy.array([0.3, -0.4])
    ...     rounded, norm = clip_and_round_to_grid(x, 1.0, grid_scale=1000)
    ...     print(rounded, norm)
    [ 300 -400] 0.5
    """
    check_grid_scale(grid_scale, l2_clip_norm)
    batch = jax.tree.map(lambda x: jax.numpy.asarray(x)[None], gradient)
    rounded, info = clip_examples(as_floats(batch), PerExampleSettings(l2_clip_norm, grid=grid_scale), None)
    return rounded, info.norms[0].astype(jax.numpy.float32)


def check_grid_scale(
    grid_scale: object,
    l2_clip_norm: object,
    rescale_to_unit_norm: bool = False,
    normalize_by: float = 1.0,
    nan_safe: bool = True,
) -> None:
    """Raise a ValueError for settings that sums of integers do not have."""
    check_grid(grid_scale)
    if not jax.config.jax_enable_x64:
        raise ValueError(
            "grid_scale needs 64-bit integers, which JAX has only in 64-bit mode. Set "
            "jax.config.update('jax_enable_x64', True) first."
        )
    if rescale_to_unit_norm or not (isinstance(normalize_by, numbers.Real) and normalize_by == 1):
        raise ValueError(
            "sums on a grid stay integers. Leave out rescale_to_unit_norm and normalize_by, and divide the result "
            "after you have added noise."
        )
    if not is_single_threshold(l2_clip_norm):
        raise ValueError(
            "grid_scale needs one number as l2_clip_norm, not a tree. gradclip.clipped_grad takes a tree, with grid=."
        )
    if not nan_safe:
        raise ValueError("nan_safe=False shows an example with NaN by a sum of NaN, but sums on a grid are integers.")


_WHOLE_EXAMPLES_SINCE = (2, 3)


def skips_whole_examples() -> bool:
    """Say whether the release in use leaves out an example with NaN or infinities, as jax-privacy does since 2.3.

    Before, only the elements that are not finite count as 0. Where jax-privacy is not installed, the newest rule holds.
    """
    found = _version()
    return found is None or found >= _WHOLE_EXAMPLES_SINCE


def _version() -> tuple[int, ...] | None:
    """Return the first two numbers of the version that is loaded, or else installed; None if there is none."""
    text = getattr(sys.modules.get("jax_privacy"), "__version__", None)
    if text is None:
        try:
            text = metadata.version("jax-privacy")
        except metadata.PackageNotFoundError:
            return None
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def widened(fun: Callable[..., Any], dtype: jax.typing.DTypeLike | None, has_aux: bool) -> Callable[..., Any]:
    """Make `fun` return results of at least the precision of `dtype`. Wider results keep their dtype."""
    if dtype is None:
        return fun

    def wide(*args: object, **kwargs: object) -> Any:
        result = fun(*args, **kwargs)
        value, *aux = result if has_aux else (result,)
        value = jax.tree.map(lambda x: cast(x, dtype, wider=True), value)
        return (value, *aux) if has_aux else value

    return wide


def cast(x: jax.Array, dtype: jax.typing.DTypeLike, *, wider: bool = False) -> jax.Array:
    """Return an array in a dtype, or in the wider of its own and that. `float0` holds no numbers and stays."""
    if x.dtype == jax.dtypes.float0:
        return x
    return x.astype(jnp.promote_types(x.dtype, dtype) if wider else dtype)


def norms_of(tree: object, thresholds: Thresholds) -> Any:
    """Return the norm of a tree, or of each part of it that has a threshold. Integers count."""
    flat = counted(as_floats(tree))
    if is_single_threshold(thresholds):
        return global_norm(flat.leaves)
    prefix, parts = flat.split_by(thresholds)
    return prefix.arrange([global_norm([flat.leaves[i] for i in part]) for part in parts])


def left_out_together(fun: Callable[..., Any], has_aux: bool, thresholds: Thresholds) -> Callable[..., Any]:
    """Make `fun` return zeros in place of all of a value that is not finite in one part.

    It returns `(value, (aux, norms))`, with the norm of each part of the value as it was.
    """

    def whole(*args: object, **kwargs: object) -> Any:
        result = fun(*args, **kwargs)
        value, aux = result if has_aux else (result, ())
        norms = norms_of(value, thresholds)
        flat = counted(as_floats(value))
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in flat.leaves]))
        return flat.rebuild([jnp.where(finite, x, jnp.zeros_like(x)) for x in flat.leaves]), (aux, norms)

    return whole


_TIMES_BOUND = {"ADD_OR_REMOVE_ONE": 1, "REPLACE_ONE": 2, "REPLACE_SPECIAL": 1}


@public_in("integrations.jax_privacy")
class AuxiliaryOutput(NamedTuple):
    """The requested per-example outputs, with the batch on axis 0. Outputs not requested are None.

    Attributes:
        values: the value of the function.
        grad_norms: the norm of the gradient, before `pre_clipping_transform`. For a tree of thresholds, a tree.
        aux: the auxiliary result.
    """

    values: Any = None
    grad_norms: Any = None
    aux: Any = None


@public_in("integrations.jax_privacy")
@dataclass(frozen=True, eq=False)
class BoundedSensitivityCallable:
    """A function with bounded sensitivity: one example changes its result by at most `l2_norm_bound`.

    With `has_aux`, the bound is on the first of the results. `clipped` is gradclip's own function. Its
    `clipped.sensitivity()` also includes the rounding error of the sum.
    """

    fun: Callable[..., Any]
    l2_norm_bound: Any
    has_aux: bool
    clipped: ClippedFunction
    _made: Callable[[], Any] | None = field(init=False, repr=False, compare=False, default=None)

    def made_by(self, call: Callable[..., Any], asked: Mapping[str, Any]) -> "BoundedSensitivityCallable":
        """Return this function, which now knows the call that made it. Pickles hold that call."""
        object.__setattr__(self, "_made", partial(call, **asked))
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return super().__reduce_ex__(protocol) if self._made is None else (self._made, ())

    @property
    def bounded_sensitivity_fun(self) -> Callable[..., Any]:
        """The name of `fun` since jax-privacy 2.3."""
        return self.fun

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fun(*args, **kwargs)

    def sensitivity(self, neighboring_relation: object = None) -> Any:
        """Return the L2 sensitivity under a `dp_accounting.NeighboringRelation`. None means REPLACE_SPECIAL.

        It holds if all batches have one shape and examples keep their places: pad them, and mark the padding with
        `is_padding_example`.
        """
        name = getattr(neighboring_relation, "name", "REPLACE_SPECIAL" if neighboring_relation is None else "")
        if name not in _TIMES_BOUND:
            raise ValueError(
                f"neighboring_relation must be one of {', '.join(_TIMES_BOUND)}, got {neighboring_relation!r}. "
                "Pass a dp_accounting.NeighboringRelation."
            )
        return _TIMES_BOUND[name] * self.l2_norm_bound


def divided(bound: Any, divisor: float) -> Any:
    """Return a bound divided by a constant, rounded up. A traced bound is rounded to nearest."""
    if isinstance(bound, jax.core.Tracer):
        return bound / divisor
    known = float(bound)
    return known if math.isinf(known) else rounded_up(Fraction(known) / Fraction(divisor))


def bound_of(thresholds: Thresholds, *, to_unit: bool) -> Any:
    """Return the largest norm of a clipped example: the root of the sum of its thresholds' squares, rounded up.

    `to_unit`: each threshold is 1. A traced threshold gives a traced bound.
    """
    if is_single_threshold(thresholds):
        return 1.0 if to_unit else thresholds
    found = jax.tree.leaves(thresholds)
    if to_unit:
        return root_up(Fraction(len(found)))
    if any(isinstance(c, jax.core.Tracer) for c in found):
        return sum(c**2 for c in found) ** 0.5
    each = list(map(float, found))
    return math.inf if math.inf in each else root_up(sum((Fraction(c) ** 2 for c in each), Fraction(0)))
