"""A drop-in replacement for `brainstate.nn.clip_grad_norm`.

To switch, write `from gradclip.integrations.brainstate import clip_grad_norm`. What differs from brainstate: the bound
holds exactly, no epsilon is added to the norm, gradients are not concatenated, and finite gradients never overflow.
"""

from typing import Literal, overload

from gradclip._src.annotations import Ord, Tree
from gradclip._src.backends.imported import needed_for
from gradclip._src.core.norms import Order
from gradclip._src.functional.clip import clip_by_global_norm
from gradclip._src.passed.leaves import as_floats
from gradclip._src.words import with_advice

with needed_for("brainstate", "jax"):
    import jax
    import jax.numpy as jnp

__all__ = ["clip_grad_norm"]


@overload
def clip_grad_norm(
    grad: Tree, max_norm: float | jax.Array, norm_type: Ord = 2.0, return_norm: Literal[False] = False
) -> Tree: ...


@overload
def clip_grad_norm(
    grad: Tree, max_norm: float | jax.Array, norm_type: Ord = 2.0, *, return_norm: Literal[True]
) -> tuple[Tree, jax.Array]: ...


@with_advice
def clip_grad_norm(
    grad: Tree, max_norm: float | jax.Array, norm_type: Ord = 2.0, return_norm: bool = False
) -> Tree | tuple[Tree, jax.Array]:
    """Scale `grad` by min(1, max_norm / norm), with the global norm over all leaves.

    Args:
        grad: any tree of JAX arrays.
        max_norm: the threshold, >= 0. May be traced.
        norm_type: a number >= 1, "inf" or inf, "-inf" or -inf; None means 2.
        return_norm: also return the norm before clipping.

    Returns:
        The clipped tree, or `(clipped, norm)`. An empty tree is returned unchanged, with norm 0.

    Raises:
        ValueError, TypeError: as in `gradclip.clip_by_global_norm`.

    The signature is that of brainstate 0.5.

    >>> clip_grad_norm({"w": jnp.array([3.0, 4.0])}, 10.0, return_norm=True)
    ({'w': Array([3., 4.], dtype=float32)}, Array(5., dtype=float32))
    """
    Order.parse(norm_type, "norm_type")
    arrays = as_floats(jax.tree.map(jnp.asarray, grad))
    clipped, norm = clip_by_global_norm(arrays, max_norm, ord=norm_type)
    return (clipped, jnp.asarray(norm)) if return_norm else clipped
