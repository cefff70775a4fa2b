"""The name `clip_pytree` of `jax_privacy.clipping`, on gradclip's engine.

Switch by writing `from gradclip.integrations.jax_privacy import clip_pytree`. What differs: the promised bound holds
in floating point too, for every dtype, and with `nan_safe=False` a NaN or an infinity makes all of its norm's
gradients NaN. As in newer releases of the library, `clip_norm` may be a tree of thresholds.
"""

from typing import Any

import jax
import jax.numpy as jnp

from gradclip.clip import clip_groups, is_single_threshold
from gradclip.coefficient import check_threshold
from gradclip.decision import Clipping
from gradclip.norms import Order
from gradclip.tree import flatten


def clip_pytree(
    pytree: Any,
    clip_norm: Any,
    rescale_to_unit_norm: bool = False,
    nan_safe: bool = True,
    return_zero: Any = False,
) -> tuple[Any, Any]:
    """Clip `pytree` by its L2 norm to `clip_norm`; return it and its norm before.

    | clip_norm     | rescale_to_unit_norm=False | rescale_to_unit_norm=True |
    |---------------|----------------------------|---------------------------|
    | 0             | zeros                      | input / norm              |
    | inf           | unchanged                  | zeros                     |
    | < 0, a number | ValueError                 | ValueError                |
    | < 0, traced   | zeros                      | zeros                     |

    A tree of zeros comes back unchanged.

    Args:
        pytree: a tree of JAX arrays.
        clip_norm: the threshold; or a prefix of `pytree` that holds thresholds, each for what lies below it.
        rescale_to_unit_norm: also divide by `clip_norm`, so that the norm is at most 1.
        nan_safe: NaN and infinities count as 0. Otherwise they make everything that shares their norm NaN.
        return_zero: return zeros, whatever the input; it may be traced.

    Returns:
        `(clipped, norm)`, with the input's structure and dtypes; the norm in float32, or a tree of norms shaped as
        `clip_norm`.

    The signature is that of jax-privacy 2.0.

    >>> clipped, norm = clip_pytree({"w": jnp.array([6.0, 8.0])}, clip_norm=20.0, rescale_to_unit_norm=True)
    >>> print([round(float(x), 4) for x in clipped["w"]], norm)
    [0.3, 0.4] 10.0
    """
    flat = flatten(jax.tree.map(jnp.asarray, pytree))
    single = is_single_threshold(clip_norm)
    prefix, groups = (None, [range(len(flat.leaves))]) if single else flat.split_by(clip_norm)
    thresholds = [check_threshold(c, "clip_norm") for c in ([clip_norm] if prefix is None else prefix.leaves)]
    policy = "zero" if nan_safe else "propagate"
    clipping = Clipping(None, Order(2.0), policy, to_unit=rescale_to_unit_norm)
    leaves, norms = clip_groups(flat, groups, thresholds, clipping)
    norms = [jnp.asarray(norm, jnp.float32) for norm in norms]
    kept = [jnp.where(return_zero, jnp.zeros_like(leaf), leaf) for leaf in leaves]
    clipped = kept if return_zero is not False else leaves
    return flat.rebuild(clipped), norms[0] if prefix is None else prefix.rebuild(norms)
