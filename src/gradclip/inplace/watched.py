"""Clipping in place under the eyes of a monitor, which also asks for the norm of each gradient now and then."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from gradclip.backends import any_distributed
from gradclip.core.fast_path import reusable
from gradclip.core.holders import ALONE
from gradclip.core.norms import Order
from gradclip.distributed.processes import ONE_PROCESS
from gradclip.inplace.gradients import entered
from gradclip.layers import fast_path
from gradclip.parameters import ParameterList
from gradclip.typing import Ord, Parameters, Policy, Scalar, Threshold

if TYPE_CHECKING:
    from gradclip.backends.values import Array
    from gradclip.monitor.monitor import Monitor


def clip_watched(
    clip: Callable[[Parameters], Scalar],
    parameters: Parameters,
    max_norm: Threshold,
    ord: Ord | Order,
    nonfinite: Policy,
    monitor: "Monitor",
) -> Scalar:
    """Clip parameters by `clip`, and have the monitor record it once that has succeeded; return the norm."""
    parameters = reusable(parameters)
    if not monitor.wants_layers:
        norm = clip(parameters)
        monitor.record(norm, max_norm, nonfinite=nonfinite)
        return norm
    parameters = list(parameters) if isinstance(parameters, Iterator) else parameters
    found = norms_of_each(parameters, Order.parse(ord))
    norm = clip(parameters)
    names, norms = found or (None, None)
    monitor.record(norm, max_norm, norms, nonfinite=nonfinite, names=names)
    return norm


def norms_of_each(parameters: Parameters, order: Order) -> "tuple[list[str], Array] | None":
    """Return the name and the norm of each gradient, a vector; None where there are none, or only parts of them."""
    params = ParameterList.of(parameters)
    if any_distributed(params.parameters) or any_distributed(params.gradients):
        return None
    gradients, backend, arrays = entered(params, ONE_PROCESS)
    if not arrays:
        return None
    names = [name.removesuffix(".grad") for name in gradients.names()]
    norms = fast_path.norms_of_each(parameters, order)
    if norms is None:
        groups = [backend.chosen(arrays, [index]) for index in range(len(arrays))]
        with backend.precision():
            norms = ALONE.measure_each(backend, groups, order).product()
    return names, norms
