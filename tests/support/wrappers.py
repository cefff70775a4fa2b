"""Optimizers around others, as the published ones are made: who steps, how they name it, what PyTorch has set up."""

from collections import OrderedDict

import torch


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization: it steps by two calls, of which the second steps another optimizer."""

    def __init__(self, params, base, rho=0.05):
        super().__init__(params, {"rho": rho})
        self.base_optimizer = base(self.param_groups)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self):
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["old"] = weight.clone()
            weight.add_(weight.grad / weight.grad.norm(), alpha=self.param_groups[0]["rho"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for weight in self.param_groups[0]["params"]:
            weight.copy_(self.state[weight]["old"])
        self.base_optimizer.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure):
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()


class Around(torch.optim.Optimizer):
    """Steps an optimizer that it has under some name. It does not call `Optimizer.__init__`, as Lookahead's in timm."""

    def __init__(self, inner, name, hooks=()):
        setattr(self, name, inner)
        self._name = name
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults
        for hook in hooks:
            setattr(self, hook, OrderedDict())

    def step(self, closure=None):
        return getattr(self, self._name).step(closure)


class Outside:
    """Steps an optimizer, and is none of PyTorch's, as ScheduleFree's wrapper is."""

    def __init__(self, inner, name):
        setattr(self, name, inner)
        self._name = name

    @property
    def param_groups(self):
        return getattr(self, self._name).param_groups

    def step(self, closure=None):
        return getattr(self, self._name).step(closure)
