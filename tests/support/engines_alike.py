"""Stand-ins for a DeepSpeed engine and for the optimizers of Megatron-Core: they step one number."""

import math
from types import SimpleNamespace


class Engine:
    """It has the methods of a DeepSpeed engine that `clip_at_step` uses, and clips one number."""

    def __init__(self, stage=2, **optimizer):
        self.stage, self.weight, self.gradient = stage, 0.0, 0.0
        self._config = SimpleNamespace(gradient_clipping=1.0)
        self._global_grad_norm, self.applied = None, True
        settings = {"clip_grad": 1.0, "step": None, "param_groups": []} | optimizer
        self.optimizer = SimpleNamespace(**settings) if optimizer.get("optimizer", "") is not None else None

    def gradient_clipping(self):
        return self._config.gradient_clipping

    def zero_optimization(self):
        return self.stage > 0

    def fp16_enabled(self):
        return False

    bfloat16_enabled = fp16_enabled

    def get_global_grad_norm(self):
        return self._global_grad_norm

    def was_step_applied(self):
        return self.applied

    def clip_fp32_gradients(self):
        raise AssertionError("DeepSpeed's own, which drops the norm")

    def step(self, gradient):
        self.gradient = gradient
        self._take_model_step(None)

    def _take_model_step(self, lr_kwargs):
        self._global_grad_norm = abs(self.gradient)
        self.applied = math.isfinite(self.gradient)
        if self.applied:
            self.weight -= min(self.gradient, self.optimizer.clip_grad)


class Optimizer:
    """One weight, whose gradient is set."""

    def __init__(self, config=None, **settings):
        self.config = config or SimpleNamespace(clip_grad=1.0, **settings)
        self.weight, self.main_grad = 0.0, 0.0

    def step(self):
        return Chained(self).step()

    def clip(self, norm):
        self.main_grad *= min(1.0, self.config.clip_grad / (norm + 1e-6))


class Chained:
    """It measures all, clips each by its own configuration, and skips above the threshold of any."""

    def __init__(self, *optimizers):
        self.chained_optimizers = optimizers
        self.config = optimizers[0].config

    def step(self):
        norm = math.hypot(*(one.main_grad for one in self.chained_optimizers))
        skip = False
        for one in self.chained_optimizers:
            if one.config.clip_grad > 0.0:
                one.clip(norm)
            skip |= norm > one.config.grad_norm_skip_threshold
        for one in () if skip else self.chained_optimizers:
            one.weight -= one.main_grad
        return not skip, norm, None
