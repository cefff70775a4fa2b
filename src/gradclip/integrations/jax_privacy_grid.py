"""The grid of `gradclip.integrations.jax_privacy`: clipped examples, rounded to integers that add up exactly."""

import numbers
from typing import Any

import jax

from gradclip._src.passed.arguments import is_single_threshold
from gradclip._src.passed.leaves import as_floats
from gradclip._src.private.sums.clip import clip_examples
from gradclip._src.private.sums.grid import check_grid
from gradclip._src.private.sums.settings import PerExampleSettings
from gradclip.typing import Threshold, Tree


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
