"""Checks of the settings of Flower's wrappers. Flower itself takes NaN, and does not name what is no number."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence

from gradclip._src.per_example.quantities import as_number

_NUMBERS = (
    "noise_multiplier",
    "clipping_norm",
    "num_sampled_clients",
    "initial_clipping_norm",
    "target_clipped_quantile",
    "clip_norm_lr",
    "clipped_count_stddev",
)


def check_numbers(made_by: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Raise a TypeError for a setting of this call that is no number, and a ValueError for NaN."""
    try:
        given = inspect.signature(made_by).bind(*args, **kwargs).arguments
    except TypeError:
        return  # the call itself says better what it lacks
    for name in _NUMBERS:
        default = name == "clipped_count_stddev" and given.get(name) is None
        if name in given and not default and math.isnan(as_number(name, given[name])):
            raise ValueError(f"{name} must not be NaN.")
