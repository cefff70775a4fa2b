"""Checks of the settings of Opacus' optimizers, in its words, before anything is made."""

import math
from collections.abc import Mapping
from typing import Any

from gradclip._src.adaptive.settings import check_between
from gradclip._src.passed.arguments import check_threshold
from gradclip._src.per_example.quantities import as_number
from gradclip._src.words import typed
from gradclip.integrations import needed_for

with needed_for("opacus", "torch"):
    from opacus.optimizers.utils import params


def check_settings(settings: Mapping[str, Any], optimizer: object, *, each_alone: bool) -> None:
    """Raise a TypeError or ValueError for a setting that is no number, or is out of range.

    `each_alone`: `max_grad_norm` holds a threshold for each parameter of `optimizer`.
    """
    noise = as_number("noise_multiplier", settings.get("noise_multiplier", 0.0))
    for name, value in settings.items():
        if name == "max_grad_norm":
            for threshold in _listed(value, len(params(optimizer))) if each_alone else [value]:
                if math.isinf(check_threshold(threshold, name)) and noise:
                    raise ValueError("max_grad_norm must be finite, or no noise can hide one example, got inf.")
        elif name == "unclipped_num_std":
            check_between(name, value, 0.0, 2.0**100, above_low=True)


def _listed(max_grad_norm: Any, count: int) -> list[object]:
    what = f"max_grad_norm must be a list with one threshold for each of the {count} parameters that are trained"
    if isinstance(max_grad_norm, str) or not hasattr(max_grad_norm, "__len__"):
        raise TypeError(f"{what}, which clipping='per_layer' clips one by one, got {typed(max_grad_norm)}.")
    if len(max_grad_norm) != count:
        raise ValueError(f"{what}, got {len(max_grad_norm)}. Those with requires_grad=False have none.")
    return list(max_grad_norm)
