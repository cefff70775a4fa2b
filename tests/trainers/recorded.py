"""What an optimizer really got at each step, found without gradclip: from its parameters and moments."""

import math

import torch


class Recorded:
    """The norms of the gradients that a step began with (`raw`), and of those that the update used (`used`).

    `raw` adds up what backward passes left in `.grad`, divided by the scale of a GradScaler, if any. `used` is found
    from the change of the parameters for plain SGD, and from that of the first moments for Adam.
    """

    def __init__(self, optimizer, scale=lambda: 1.0):
        self.raw, self.used = [], []
        self._optimizer = optimizer
        self._params = [p for group in optimizer.param_groups for p in group["params"]]
        self._raw = {}
        for index, p in enumerate(self._params):
            p.register_post_accumulate_grad_hook(lambda p, index=index: self._left(index, p.grad / scale()))
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    def _left(self, index, grad):
        self._raw[index] = norm_of([grad])

    def _begin(self, *_):
        self._before = [self._known(p) for p in self._params]

    def _end(self, *_):
        pairs = zip(self._before, (self._known(p) for p in self._params), strict=True)
        self.used.append(norm_of([self._gradient(before, after) for before, after in pairs]))
        self.raw.append(math.hypot(*self._raw.values()))

    @property
    def _adam(self):
        return isinstance(self._optimizer, torch.optim.Adam)

    def _known(self, p):
        if self._adam:
            return self._optimizer.state[p].get("exp_avg", torch.zeros_like(p)).detach().double().clone()
        return p.detach().double().clone()

    def _gradient(self, before, after):
        (group, *_) = self._optimizer.param_groups
        if self._adam:
            decay = group["betas"][0]
            return (after - decay * before) / (1 - decay)
        return (before - after) / group["lr"]

    def check(self, max_norm, steps):
        """Assert that each update used what was there, clipped to `max_norm`; some steps must be clipped, some not."""
        assert len(self.used) == steps, self.used
        for raw, used in zip(self.raw, self.used, strict=True):
            assert math.isclose(used, min(raw, max_norm), rel_tol=1e-3, abs_tol=1e-6), (self.raw, self.used)
        assert min(self.raw) < max_norm < max(self.raw), self.raw


def norm_of(tensors):
    return math.sqrt(sum(float((t.double() ** 2).sum()) for t in tensors))
