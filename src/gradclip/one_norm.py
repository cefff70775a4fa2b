"""Gradients that a call in place has taken, clipped by one norm."""

from collections.abc import Sequence
from typing import Any

from gradclip.backends.on_device import OnDevice
from gradclip.core.decision import Clipping
from gradclip.core.each_norm import EachNorm
from gradclip.core.holders import Holders
from gradclip.core.norms import Order
from gradclip.core.pipeline import decide, seen
from gradclip.core.records import Seen
from gradclip.gradients import Gradients, Taken
from gradclip.ordinary import Ordinary
from gradclip.parameters import ParameterList
from gradclip.typing import Scalar


def clip_each(given: Ordinary, max_norm: float, order: Order, params: ParameterList, each: EachNorm) -> Scalar | None:
    """Clip ordinary gradients, and give the norm of each to `each`. None if one look does not settle it."""
    sums: list[float] = []
    distinct = len(set(map(id, given.leaves))) == len(given.leaves)  # else an empty one may be listed twice
    norm = given.clip_(max_norm, order, sums) if distinct else None
    if norm is not None:
        each.take(sums, order, _owned(params, given), lambda: Gradients.of(params).names_of_layers())
    return norm


def _owned(params: ParameterList, given: Ordinary | OnDevice) -> tuple[Sequence[Any], object]:
    """Return the parameters that hold the gradients, and how they were listed."""
    lacking = len(params.parameters) > len(given.leaves)
    owners = [one for one in params.parameters if one.grad is not None] if lacking else params.parameters
    return owners, (params.sizes, params.names)


def clip_on_device(
    given: OnDevice,
    asked: Clipping,
    skip_above: float | None,
    params: ParameterList | None,
    each: EachNorm | None,
) -> tuple[Scalar, Seen | None] | None:
    """Clip gradients that kernels on their device read, likewise. None if that is not possible."""
    order, policy = asked.order, asked.nonfinite
    if each is None and skip_above is None:
        norm = given.clip_(asked.max_norm, order, policy)
        return None if norm is None else (norm, None)
    wanted = each if params is not None and each is not None and each.wants(order) else None
    found = given.clip_watched_(asked.max_norm, order, policy, each=wanted is not None, skip_above=skip_above)
    if found is None:
        return None
    norm, norms, shown = found
    if wanted is not None and params is not None:
        wanted.take_norms(norms, _owned(params, given), lambda: Gradients.of(params).names_of_layers())
    return norm, shown


def clip_taken(
    taken: Taken, holders: Holders, asked: Clipping, skip_above: float | None, each: EachNorm | None
) -> tuple[Scalar, Seen | None]:
    """Clip gradients after all checks."""
    gradients, backend, arrays = taken
    with backend.precision():
        if each is not None:
            each.measure(backend, arrays, asked.order, gradients.names_of_layers)
        if asked.nonfinite.zeroes and holders.sees_all:
            asked = taken.cleared(asked)
        made = decide(backend, arrays, asked, gradients.names, holders=holders)
        norm = backend.leave_scalar(made.norm.product(), holders.norm_dtype(arrays), gradients.grads)
        shown = None if skip_above is None else seen(backend, made.norm, asked.max_norm, skip_above)
        taken.scale(made)
    return norm, shown
