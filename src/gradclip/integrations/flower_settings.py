"""Checks of the settings of Flower's wrappers. Flower itself takes NaN, and does not name what is no number."""

import math
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature

from gradclip._src.private.sums.quantities import as_number

_NUMBERS = (
    "noise_multiplier",
    "clipping_norm",
    "num_sampled_clients",
    "initial_clipping_norm",
    "target_clipped_quantile",
    "clip_norm_lr",
    "clipped_count_stddev",
)


def checked(made_by: Callable[..., None]) -> Callable[..., None]:
    """Return the `__init__` of a strategy with a TypeError for a setting that is no number, a ValueError for NaN."""

    @wraps(made_by)
    def make(self: object, *args: object, **kwargs: object) -> None:
        try:
            given = signature(made_by).bind(self, *args, **kwargs).arguments
        except TypeError:
            given = {}  # the call itself says better what it lacks
        _check_numbers(given)
        made_by(self, *args, **kwargs)

    return make


def _check_numbers(given: Mapping[str, object]) -> None:
    for name in _NUMBERS:
        default = name == "clipped_count_stddev" and given.get(name) is None
        if name in given and not default and math.isnan(as_number(name, given[name])):
            raise ValueError(f"{name} must not be NaN.")
