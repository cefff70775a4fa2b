"""What an in-place call refuses because it holds no gradients that can be written."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradclip._src.backends.registry import entry_of, lies_itself, load
from gradclip._src.tree import FlatTree


def refuse_leaf(flat: FlatTree) -> None:
    """Raise a TypeError that names the first leaf of a tree that cannot be written in place."""
    for leaf, path in zip(flat.leaves, flat.paths(), strict=True):
        if not (isinstance(leaf, np.ndarray) or lies_itself(leaf)):
            raise TypeError(
                f"a tree to clip in place must hold only NumPy arrays, got {type(leaf).__name__} at "
                f"{path or 'the gradient'}. Pass NumPy arrays, or parameters with a .grad. For other arrays, call "
                "gradclip.clip_by_global_norm, which returns new ones."
            )


def refuse_bare_gradients(parameters: Sequence[Any]) -> None:
    """Raise a ValueError that names the first parameter that looks like a gradient."""
    for index, parameter in enumerate(parameters):
        entry = entry_of(parameter)
        if entry is not None and load(entry).is_bare(parameter):
            raise ValueError(
                f"parameters[{index}] has no .grad and does not require one, so it looks like a gradient. Pass the "
                "parameters. To clip the gradients themselves, call gradclip.clip_by_global_norm."
            )
