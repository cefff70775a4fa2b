"""Drop-in replacements for the functions of `jax_privacy.clipping`.

To switch, write `from gradclip.integrations.jax_privacy import clipped_grad`. What differs from jax-privacy:

- The norm bound also holds in floating point, for every dtype.
- With `nan_safe=False`, a NaN or infinity turns all gradients that share its norm into NaN.
- Trees of thresholds and `grid_scale`, which jax-privacy has since 2.2, work with any release of it. NaN and infinities
  follow the rule of the release that is installed, or of 2.3 if none is.
- Examples are summed in float32 or wider.
- The batch size need not be a multiple of `microbatch_size`.
"""

from typing import Any

from gradclip._src.annotations import Thresholds, Tree
from gradclip._src.backends.imported import needed_for
from gradclip._src.core.decision import Clipping
from gradclip._src.core.layouts import LAYER
from gradclip._src.core.nonfinite import PROPAGATE, ZERO
from gradclip._src.core.norms import Order
from gradclip._src.core.rules import CLIP, Target
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.functional.driver import Leaves, clip_groups
from gradclip._src.passed.arguments import check_flag, check_threshold, is_array, is_single_threshold
from gradclip._src.passed.leaves import as_floats, counted, split_by
from gradclip._src.words import with_advice

with needed_for("jax_privacy", "jax"):
    import jax
    import jax.numpy as jnp

    from gradclip.integrations._jax_privacy_sums import (
        JaxPrivacyFunction,  # noqa: F401  # pickles name it here
        PlanConfig,  # noqa: F401
        clipped_fun,
        clipped_grad,
        unchanged,  # noqa: F401
        with_gradclip,
    )
    from gradclip.integrations._jax_privacy_values import (
        AuxiliaryOutput,
        BoundedSensitivityCallable,
        clip_and_round_to_grid,
        skips_whole_examples,
    )

__all__ = [
    "AuxiliaryOutput",
    "BoundedSensitivityCallable",
    "clip_and_round_to_grid",
    "clip_pytree",
    "clipped_fun",
    "clipped_grad",
    "with_gradclip",
]

_ZEROES_ELEMENTS = not skips_whole_examples()


@with_advice
def clip_pytree(
    pytree: Tree,
    clip_norm: Thresholds,
    rescale_to_unit_norm: bool = False,
    nan_safe: bool = _ZEROES_ELEMENTS,
    return_zero: bool | jax.Array = False,
) -> tuple[Tree, Any]:
    """Clip `pytree` to the L2 norm `clip_norm`. Return the clipped tree and the norm before clipping.

    | clip_norm     | rescale_to_unit_norm=False | rescale_to_unit_norm=True |
    |---------------|----------------------------|---------------------------|
    | 0             | zeros                      | input / norm              |
    | inf           | unchanged                  | zeros                     |
    | < 0, a number | ValueError                 | ValueError                |
    | < 0, traced   | zeros                      | zeros                     |

    A tree of zeros comes back unchanged.

    Args:
        pytree: a tree of JAX arrays.
        clip_norm: the threshold, or a prefix of `pytree` with thresholds as leaves. Each threshold applies to the
            subtree below it.
        rescale_to_unit_norm: also divide by `clip_norm`, so that the norm is at most 1.
        nan_safe: treat NaN and infinities as 0. If False, they turn everything that shares their norm into NaN, and
            the norm is not finite. By default True if jax-privacy up to 2.2 is installed. Since 2.3 its `clip_pytree`
            has no `nan_safe`, and does as with False.
        return_zero: return zeros for any input. May be traced.

    Returns:
        `(clipped, norm)`. `clipped` has the structure and dtypes of the input. `norm` is float32; for a tree of
        thresholds it is a tree of norms with the same structure.

    The signature is that of jax-privacy 2.0.

    >>> clipped, norm = clip_pytree(
    ...     {"w": jnp.array([6.0, 8.0])}, clip_norm=20.0, rescale_to_unit_norm=True
    ... )
    >>> print([round(float(x), 4) for x in clipped["w"]], norm)
    [0.3, 0.4] 10.0
    """
    rescale_to_unit_norm = check_flag("rescale_to_unit_norm", rescale_to_unit_norm)
    nan_safe = check_flag("nan_safe", nan_safe)
    if not (is_array(return_zero) and return_zero.shape == ()):
        return_zero = check_flag("return_zero", return_zero)
    arrays = jax.tree.map(jnp.asarray, pytree)
    flat = counted(as_floats(arrays))
    single = is_single_threshold(clip_norm)
    prefix, layers = (None, LAYER) if single else split_by(flat, clip_norm)
    thresholds = [check_threshold(c, "clip_norm") for c in ([clip_norm] if prefix is None else prefix.leaves)]
    policy = ZERO if nan_safe else PROPAGATE
    clipping = Clipping(None, Order(2.0), policy, Target(1.0) if rescale_to_unit_norm else CLIP)
    leaves, norms = with_subnormals(clip_groups)(Leaves(flat), layers, thresholds, clipping)
    norms = [jnp.asarray(norm, jnp.float32) for norm in norms]
    kept = [jnp.where(return_zero, jnp.zeros_like(leaf), leaf) for leaf in leaves]
    clipped = kept if return_zero is not False else leaves
    rebuilt = jax.tree.map(_with_dtype_of, flat.rebuild(clipped), arrays)
    return rebuilt, norms[0] if prefix is None else prefix.arrange(norms)


def _with_dtype_of(clipped: jax.Array, x: jax.Array) -> jax.Array:
    """Return a result in the dtype of what was clipped; integers are rounded toward zero, which keeps the bound."""
    return clipped.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.integer) else clipped
