"""What a monitor records of backward passes in which each gradient is clipped by itself: at the end of each, a step.

Only then are the norms of all gradients known. PyTorch calls back when a pass has ended; one that raises records no
step.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch

from gradclip._src.backends.registry import find
from gradclip._src.core.decision import Clipping
from gradclip._src.core.nonfinite import Nonfinite
from gradclip._src.core.norms import Order
from gradclip._src.core.rules import CLIP
from gradclip._src.inplace.norm import grad_norm
from gradclip._src.inplace.watched import record_norms
from gradclip._src.monitor.monitor import Monitor
from gradclip._src.step.heard import current_pass

_MOST = 64  # passes: those that raise never end


class PassesWatched:
    """Takes the norms of the gradients of a backward pass, and has the monitor record them when it ends."""

    def __init__(self, monitor: Monitor, names: Sequence[str], order: Order, nonfinite: Nonfinite) -> None:
        self.monitor = monitor
        self._places = {name: place for place, name in enumerate(names)}
        self._clipping = Clipping(None, order, nonfinite, CLIP)
        self._found: dict[int, dict[str, tuple[torch.Tensor, float]]] = {}  # by pass: one may run within another

    def add(self, name: str, norm: torch.Tensor, threshold: float) -> None:
        """Take the norm of a gradient, and its threshold."""
        running = current_pass()
        if running not in self._found:
            if len(self._found) == _MOST:
                del self._found[next(iter(self._found))]
            self._found[running] = {}
            engine = cast("Any", torch.autograd.Variable)._execution_engine
            engine.queue_callback(partial(self._end, running))
        self._found[running][name] = norm, threshold

    def missed(self, name: str, parameter: torch.Tensor) -> None:
        """Tell the monitor which gradient made a pass raise."""
        each = self.monitor._watching()
        if each is not None:
            each.put(grad_norm([parameter], self._clipping.order).reshape(1), [name])
        self.monitor._missed(each)

    def _end(self, ended: int) -> None:
        found = self._found.pop(ended, {})
        if not found:
            return
        names = sorted(found, key=self._places.__getitem__)
        norms, thresholds = zip(*(found[name] for name in names), strict=True)
        near = _side_by_side(norms)
        backend, each = find(near, lambda: names), self.monitor._watching()
        with backend.precision():
            record_norms(self.monitor, each, backend, near, thresholds, lambda: names, self._clipping)


def _side_by_side(norms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return norms on the device of the first."""
    return [norm.to(norms[0].device, non_blocking=True) for norm in norms]
