"""A drop-in replacement for `mlx.optimizers.clip_grad_norm`.

To switch, write `from gradclip.integrations.mlx import clip_grad_norm`. What differs from MLX:

- The bound holds exactly, and nothing is added to the norm.
- Norms do not overflow or underflow, and are returned in float32 or wider.
- Each array keeps its dtype. Arrays that need no clipping are returned bit-identical.
"""

from typing import TypeVar

from gradclip._src.backends.imported import needed_for
from gradclip._src.functional.clip import clip_by_global_norm
from gradclip._src.passed.leaves import as_floats
from gradclip._src.words import with_advice

with needed_for("mlx", "mlx.core"):
    import mlx.core as mx

__all__ = ["clip_grad_norm"]

Gradients = TypeVar("Gradients")  # a tree of MLX arrays, such as `nn.value_and_grad` returns


@with_advice
def clip_grad_norm(grads: Gradients, max_norm: float | mx.array) -> tuple[Gradients, mx.array]:
    """Scale `grads` by min(1, max_norm / norm), with the global norm over all arrays.

    Args:
        grads: any tree of MLX arrays. Integers become float32, as in MLX.
        max_norm: the threshold, >= 0, in the units of the gradients: a number or a scalar array, which may be traced.

    Returns:
        The clipped tree, and the norm before clipping. If the norm is not finite, all arrays become NaN.

    Raises:
        ValueError, TypeError: as in `gradclip.clip_by_global_norm`.

    The signature is that of MLX 0.32.

    >>> clip_grad_norm({"w": mx.array([3.0, 4.0])}, 10.0)
    ({'w': array([3, 4], dtype=float32)}, array(5, dtype=float32))
    """
    clipped, norm = clip_by_global_norm(as_floats(grads), max_norm)
    return clipped, norm if isinstance(norm, mx.array) else mx.array(norm, dtype=mx.float32)
