"""The thresholds of parameters that are clipped one by one, so that all together keep to one threshold."""

import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

import torch

from gradclip._src.annotations import Threshold
from gradclip._src.core.norms import Order
from gradclip._src.inplace.groups import parts_of
from gradclip._src.passed.arguments import check_threshold
from gradclip._src.passed.parameters import ParameterList

Shares = Callable[[Mapping[str, int]], Mapping[str, float]]
"""Returns the thresholds of parameters from their numbers of elements, both by name."""


def of_patterns(
    max_norm: Mapping[str, Threshold | None], parameters: Mapping[str, torch.Tensor], order: Order
) -> Shares:
    """Return the thresholds of parameters, those of one pattern sharing its threshold. Raises as `parts_of` does.

    Frozen parameters need to match none.
    """
    patterns = [one for one in max_norm if isinstance(one, str)]
    counting = [
        name
        for name, parameter in parameters.items()
        if parameter.requires_grad or any(fnmatchcase(name, one) for one in patterns)
    ]
    parts = parts_of(ParameterList.of([(name, parameters[name]) for name in counting]), max_norm, alone=True)
    each = [(_number(part.recorded, part.told), [counting[place] for place in part.places]) for part in parts]

    def of_sizes(sizes: Mapping[str, int]) -> dict[str, float]:
        found: dict[str, float] = {}
        for limit, names in each:
            found |= shares(limit, {name: sizes[name] for name in names if name in sizes}, order.p)
        return found

    return of_sizes


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


def _number(threshold: Threshold, name: str = "max_norm") -> float:
    number = check_threshold(threshold, name)
    # Read the value of a scalar array now, once, not at each backward pass.
    return number if isinstance(number, float) else float(check_threshold(number.item(), name))
