"""In-place clipping with a monitor, which sometimes also wants the norm of each gradient."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from gradclip import fast_path
from gradclip.core.holders import ALONE
from gradclip.core.layouts import Groups
from gradclip.core.norms import Order
from gradclip.core.pipeline import measure_all
from gradclip.distributed.processes import ONE_PROCESS, processes_of, telling
from gradclip.inplace.gradients import Gradients, entered
from gradclip.parameters import ParameterList, repeatable
from gradclip.typing import Ord, Parameters, Policy, Scalar, Threshold

if TYPE_CHECKING:
    from gradclip.adaptive.holder import AdaptiveNorm
    from gradclip.core.values import Array
    from gradclip.monitor.monitor import Monitor


def check_monitor(monitor: object) -> None:
    """Raise a TypeError if `monitor` is not a monitor."""
    if isinstance(monitor, type) or not hasattr(monitor, "record"):
        raise TypeError(
            f"monitor must be a gradclip.Monitor, got {monitor!r:.80} of type {type(monitor).__name__}. Before the "
            "loop, write monitor = gradclip.Monitor(), and pass it at every step."
        )


def clip_watched(
    clip: Callable[[Parameters], Scalar],
    parameters: Parameters,
    max_norm: "Threshold | AdaptiveNorm",
    ord: Ord | Order,
    nonfinite: Policy,
    monitor: "Monitor",
    *,
    alone: bool,
) -> Scalar:
    """Clip the parameters with `clip`, then have the monitor record the call; return the norm.

    The norm of each gradient is recorded only if this process is `alone`: otherwise others may hold parts of it.
    """
    if not (alone and monitor.wants_layers):
        norm = clip(parameters)
        monitor.record(norm, max_norm, nonfinite=nonfinite)
        return norm
    with telling(parameters, None, None):
        parameters = repeatable(parameters)
        params = ParameterList.of(parameters)
    listed = parameters if params.tree is not None else params.parameters
    sums: list[float] = []
    norm = fast_path.clip_grad_norm_(listed, max_norm, ord, nonfinite, sums)
    if norm is None:
        names, norms = _names_and_norms(params, ord)
        norm = clip(parameters)
    else:
        names = _names(Gradients.of(params))
        norms = np.array(sums) ** (1 / Order.parse(ord).p)
    monitor.record(norm, max_norm, norms, nonfinite=nonfinite, names=names)
    return norm


def _names_and_norms(params: ParameterList, ord: Ord | Order) -> "tuple[list[str] | None, Array | None]":
    """Return the names and a vector of the norms of the gradients; None if there are none or only parts of them."""
    if processes_of(params, None, None) is not ONE_PROCESS:
        return None, None
    gradients, backend, arrays = entered(params, ONE_PROCESS)
    if not arrays:
        return None, None
    with backend.precision():
        norms = measure_all(backend, arrays, Groups.each_alone(len(arrays)), Order.parse(ord), ALONE).product()
    return _names(gradients), norms


def _names(gradients: Gradients) -> list[str]:
    return [name.removesuffix(".grad") for name in gradients.names()]
