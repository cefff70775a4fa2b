"""`QuantileClip` of the package `autoclip`, for PyTorch, on gradclip's engine.

Switch by writing `from gradclip.integrations.autoclip import QuantileClip`. What differs: norms that are NaN, infinite
or zero change no threshold, where one NaN in the history makes every later gradient NaN there; where the quantile lies
between two norms the threshold is one of them, and not between them; the result's norm is at most the threshold,
exactly; and optimizers that clip first do so with closures and under GradScaler, too. States have the package's format,
so that those it has saved can be loaded.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gradclip.adaptive.holder import AdaptiveNorm
from gradclip.adaptive.quantile import QuantileThreshold
from gradclip.inplace.clip import clip_grad_norm_
from gradclip.integrations import needed_for

with needed_for("autoclip"):
    import torch

__all__ = ["OptimizerWithClipping", "QuantileClip"]

Group = dict[str, Any]
_GLOBAL = "global_history"


class QuantileClip:
    """Clip each gradient to a quantile of its own last norms, or with `global_threshold` all of them together.

    Args:
        parameters: an iterable of parameters, or of groups of them, dicts, which may have a `quantile` and a
            `history_length` of their own. With `global_threshold` those of groups count for nothing.
        quantile: from 0 to 1.
        history_length: how many norms are kept, at most 32,768.
        global_threshold: whether all gradients share one norm and one threshold.

    Attributes:
        parameter_groups: the groups, as given and with what they left out.
        global_threshold: as given.

    Raises:
        TypeError: what is no parameter, or no number. ValueError: no parameters, one that occurs twice, a number out of
        its range.

    The signature is that of `autoclip.torch.QuantileClip` 0.2.1.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> clipper = QuantileClip([weight], quantile=0.5)
    >>> for gradient in ([3.0, 4.0], [30.0, 40.0]):
    ...     weight.grad = torch.tensor(gradient)
    ...     clipper.step()
    >>> weight.grad
    tensor([3.0000, 4.0000])
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter] | Iterable[Group],
        quantile: float = 0.9,
        history_length: int = 1000,
        global_threshold: bool = False,
    ) -> None:
        self.global_threshold = global_threshold
        self.defaults = {"quantile": quantile, "history_length": history_length}
        self.parameter_groups: list[Group] = []
        self._together = AdaptiveNorm(_rule(self.defaults))
        self._each: dict[torch.Tensor, AdaptiveNorm] = {}
        if isinstance(parameters, torch.Tensor) or not isinstance(parameters, Iterable):
            raise TypeError(
                f"parameters must be an iterable of tensors or dicts, got {type(parameters).__name__}. Pass "
                "model.parameters()."
            )
        listed: list[Any] = list(parameters)
        if not listed:
            raise ValueError("QuantileClip got no parameters. Call model.parameters() again, or keep a list of them.")
        for group in listed if isinstance(listed[0], dict) else [{"params": listed}]:
            self.add_param_group(group)

    @classmethod
    def as_optimizer(
        cls,
        optimizer: torch.optim.Optimizer,
        quantile: float = 0.9,
        history_length: int = 1000,
        global_threshold: bool = False,
    ) -> "OptimizerWithClipping":
        """Return an optimizer whose steps clip first."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return OptimizerWithClipping(optimizer, cls(parameters, quantile, history_length, global_threshold))

    def step(self) -> None:
        """Clip the gradients, and observe their norms."""
        if self.global_threshold:
            clip_grad_norm_([p for group in self.parameter_groups for p in group["params"]], self._together)
            return
        for parameter, max_norm in self._each.items():
            if parameter.grad is not None:
                clip_grad_norm_([parameter], max_norm)

    def add_param_group(
        self, parameter_group: Group, quantile: float | None = None, history_length: int | None = None
    ) -> None:
        """Add a group of parameters: a dict with them under "params", a tensor, or an iterable of tensors."""
        given = dict(parameter_group) if isinstance(parameter_group, Mapping) else {"params": parameter_group}
        if isinstance(given["params"], set):
            raise TypeError("parameters must come in an order, got a set, whose order may differ from run to run.")
        params = [given["params"]] if isinstance(given["params"], torch.Tensor) else list(given["params"])
        _check_parameters(params, self._each)
        own = {"quantile": quantile, "history_length": history_length}
        chosen = {name: value for name, value in own.items() if value is not None}
        group = {**self.defaults, **given, **chosen, "params": params}
        self._each.update({parameter: AdaptiveNorm(_rule(group)) for parameter in params})
        self.parameter_groups.append(group)

    def state_dict(self) -> dict[str, Any]:
        """Return the last norms, tensors with the oldest first, by the `id` of each parameter."""
        state: dict[Any, Any] = {
            id(parameter): {"history": _norms(max_norm)} for parameter, max_norm in self._each.items() if max_norm.steps
        }
        if self.global_threshold and self._together.steps:
            state[_GLOBAL] = _norms(self._together)
        groups = [{**group, "params": list(map(id, group["params"]))} for group in self.parameter_groups]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state. Raises ValueError where its groups are not as many, or not as large, as these."""
        saved = state_dict["param_groups"]
        sizes, here = ([len(group["params"]) for group in groups] for groups in (saved, self.parameter_groups))
        if sizes != here:
            raise ValueError(f"the state has parameter groups of the sizes {sizes}, this QuantileClip of {here}.")
        for group, old in zip(self.parameter_groups, saved, strict=True):
            group.update({name: value for name, value in old.items() if name != "params"})
            for parameter, key in zip(group["params"], old["params"], strict=True):
                self._each[parameter] = _holder(group, state_dict["state"].get(key, {}).get("history", ()))
        if _GLOBAL in state_dict["state"]:
            self._together = _holder(self.defaults, state_dict["state"][_GLOBAL])


class OptimizerWithClipping(torch.optim.Optimizer):
    """An optimizer whose steps clip first, and whose state has both. Else it is as the optimizer."""

    # GradScaler is to unscale the gradients before the step, that of fused optimizers too: clipping comes between.
    _step_supports_amp_scaling = False

    def __init__(self, optimizer: torch.optim.Optimizer, clipper: QuantileClip) -> None:
        self.optimizer = optimizer
        self.clipper = clipper

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Clip, then step; where a closure makes the gradients, clip after that."""
        if closure is None:
            self.clipper.step()
            return self.optimizer.step()

        def clipped_after() -> float:
            loss = closure()
            self.clipper.step()
            return loss

        return self.optimizer.step(closure=clipped_after)

    def add_param_group(self, param_group: Group, **settings: Any) -> None:
        """Add a group to both; `settings` are those of `QuantileClip.add_param_group`."""
        self.optimizer.add_param_group(param_group)
        self.clipper.add_param_group({"params": param_group["params"]}, **settings)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of both, under "optimizer" and "clipper"."""
        return {"optimizer": self.optimizer.state_dict(), "clipper": self.clipper.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the states of both."""
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.clipper.load_state_dict(state_dict["clipper"])

    def __repr__(self) -> str:
        return f"OptimizerWithClipping({self.optimizer!r}, {self.clipper!r})"

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["optimizer"], name)

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "clipper": self.clipper}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _rule(settings: Group) -> QuantileThreshold:
    quantile = float(settings["quantile"])
    return QuantileThreshold(factor=1.0, quantile=quantile, window=settings["history_length"])


def _holder(settings: Group, norms: Iterable[Any]) -> AdaptiveNorm:
    """Return a holder that has observed the norms of a state, the oldest of which comes first."""
    max_norm = AdaptiveNorm(_rule(settings))
    listed = [float(norm) for norm in norms]
    counts = {"steps": len(listed), "clipped": 0, "skipped": 0}
    newest = {"ord": 2.0, "dtype": "float32", "norms": listed[::-1], "norm": None, "threshold": None}
    max_norm.load_state_dict({**newest, **counts})
    return max_norm


def _norms(max_norm: AdaptiveNorm) -> torch.Tensor:
    return torch.tensor(max_norm.state_dict()["norms"][::-1])


def _check_parameters(params: list[Any], known: Mapping[torch.Tensor, object]) -> None:
    for parameter in params:
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(f"QuantileClip clips the gradients of tensors, got {type(parameter).__name__}.")
        if not parameter.is_leaf:
            raise ValueError("a tensor that was computed from others has no gradient to clip. Pass parameters.")
    if len(set(params)) < len(params) or not known.keys().isdisjoint(params):
        raise ValueError("a parameter occurs twice, in one group or in two. Pass each of them once.")
