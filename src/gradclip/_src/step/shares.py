"""The thresholds of parameters that are clipped one by one, so that all together keep to one threshold."""

import math
from collections.abc import Callable, Mapping

import torch

from gradclip._src.annotations import Threshold
from gradclip._src.core.norms import Order
from gradclip._src.passed.arguments import check_threshold
from gradclip._src.words import listed

Shares = Callable[[Mapping[str, int]], Mapping[str, float]]
"""Returns the thresholds of parameters from their numbers of elements, both by name."""


def by_name_of(max_norm: Mapping[str, Threshold], parameters: Mapping[str, torch.Tensor]) -> Shares:
    """Return the thresholds that parameters have by name. Raises ValueError if names do not match."""
    max_norms = _checked_names(max_norm, parameters)
    return lambda sizes: {name: max_norms[name] for name in sizes if name in max_norms}


def shared(max_norm: Threshold, order: Order) -> Shares:
    """Return the thresholds of parameters that share one."""
    number = _number(max_norm)
    return lambda sizes: shares(number, sizes, order.p)


def shares(max_norm: float, sizes: Mapping[str, int], p: float) -> dict[str, float]:
    """Return thresholds for parts of these sizes; each to the power p, they add up to at most `max_norm` to that power.

    Each is lowered by 2**-48, relatively. The quotient, the root and the product err by far less. The step down covers
    the rounding below the normal range.
    """
    if math.isinf(p) or math.isinf(max_norm) or len(sizes) == 1:
        return dict.fromkeys(sizes, max_norm)
    whole = max(1, sum(sizes.values()))
    each = {name: max_norm * ((size / whole) ** (1.0 / p) * (1.0 - 2.0**-48)) for name, size in sizes.items()}
    return {name: math.nextafter(share, 0.0) for name, share in each.items()}


def _checked_names(max_norm: Mapping[str, Threshold], parameters: Mapping[str, torch.Tensor]) -> dict[str, float]:
    missing, unknown = (
        sorted({name for name, one in parameters.items() if one.requires_grad} - max_norm.keys()),
        sorted(map(str, max_norm.keys() - parameters.keys())),
    )
    if missing or unknown:
        told = [f"none for {listed(missing)}"] * bool(missing) + [f"one for {listed(unknown)}"] * bool(unknown)
        raise ValueError(
            f"max_norm must have a threshold for each parameter that requires a gradient, got {' and '.join(told)}. "
            "To leave a parameter unclipped, pass math.inf."
        )
    return {name: _number(max_norm[name], f"max_norm[{name!r}]") for name in parameters if name in max_norm}


def _number(threshold: Threshold, name: str = "max_norm") -> float:
    number = check_threshold(threshold, name)
    # Read the value of a scalar array now, once, not at each backward pass.
    return number if isinstance(number, float) else float(check_threshold(number.item(), name))
