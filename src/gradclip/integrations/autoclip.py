"""A drop-in replacement for `QuantileClip` of the package `autoclip`, for PyTorch.

To switch, write `from gradclip.integrations.autoclip import QuantileClip`. What differs from autoclip:

- NaN, infinite and zero norms do not change the threshold. In autoclip, one NaN in the history turns every later
  gradient into NaN.
- If the quantile falls between two norms, the threshold is one of the two, not an interpolation.
- The result's norm never exceeds the threshold, even by rounding.
- `as_optimizer` also works with closures and under GradScaler.

States have autoclip's format: you can load states that autoclip saved.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gradclip._src.inplace.norm import clip_grad_norm_
from gradclip._src.thresholds.holder import AdaptiveNorm
from gradclip._src.thresholds.quantile import QuantileThreshold
from gradclip._src.thresholds.settings import check_window
from gradclip.integrations import needed_for

with needed_for("autoclip", "torch"):
    import torch

__all__ = ["OptimizerWithClipping", "QuantileClip"]

Group = dict[str, Any]
_GLOBAL = "global_history"


class QuantileClip:
    """Clip each gradient to a quantile of its own recent norms. With `global_threshold`, clip all of them together.

    Args:
        parameters: an iterable of parameters, or of parameter groups (dicts). A group may set its own `quantile` and
            `history_length`. With `global_threshold`, these are ignored.
        quantile: from 0 to 1.
        history_length: how many norms to keep, at most 32,768.
        global_threshold: use one norm and one threshold for all gradients.

    Attributes:
        parameter_groups: the groups, with defaults filled in.
        global_threshold: as given.

    Raises:
        TypeError: not a parameter, or not a number.
        ValueError: no parameters, a parameter that occurs twice, or a number out of range.

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
            raise ValueError("QuantileClip got no parameters. Call model.parameters() again, or pass a list.")
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
        """Wrap an optimizer so that each step clips the gradients first."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return OptimizerWithClipping(optimizer, cls(parameters, quantile, history_length, global_threshold))

    def step(self) -> None:
        """Clip the gradients and add their norms to the history."""
        if self.global_threshold:
            clip_grad_norm_([p for group in self.parameter_groups for p in group["params"]], self._together)
            return
        for parameter, max_norm in self._each.items():
            if parameter.grad is not None:
                clip_grad_norm_([parameter], max_norm)

    def add_param_group(
        self, parameter_group: Group, quantile: float | None = None, history_length: int | None = None
    ) -> None:
        """Add a parameter group: a dict with the parameters under "params", a tensor, or an iterable of tensors."""
        given = dict(parameter_group) if isinstance(parameter_group, Mapping) else {"params": parameter_group}
        if isinstance(given["params"], set):
            raise TypeError("parameters must be ordered, got a set, which has no fixed order. Pass a list.")
        params = [given["params"]] if isinstance(given["params"], torch.Tensor) else list(given["params"])
        _check_parameters(params, self._each)
        own = {"quantile": quantile, "history_length": history_length}
        chosen = {name: value for name, value in own.items() if value is not None}
        group = {**self.defaults, **given, **chosen, "params": params}
        self._each.update({parameter: AdaptiveNorm(_rule(group)) for parameter in params})
        self.parameter_groups.append(group)

    def state_dict(self) -> dict[str, Any]:
        """Return the recent norms under the `id` of each parameter, as tensors with the oldest norm first."""
        state: dict[Any, Any] = {
            id(parameter): {"history": _norms(max_norm)} for parameter, max_norm in self._each.items() if max_norm.steps
        }
        if self.global_threshold and self._together.steps:
            state[_GLOBAL] = _norms(self._together)
        groups = [{**group, "params": list(map(id, group["params"]))} for group in self.parameter_groups]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state. Raises ValueError if the number or the sizes of its parameter groups differ."""
        saved = state_dict["param_groups"]
        sizes, here = ([len(group["params"]) for group in groups] for groups in (saved, self.parameter_groups))
        if sizes != here:
            raise ValueError(
                f"the state has parameter groups of sizes {sizes}, but this QuantileClip has {here}. Create it with "
                "the same groups, then load the state."
            )
        # Nothing is changed before all of the state has been read.
        pairs = zip(self.parameter_groups, saved, strict=True)
        groups = [{**group, **old, "params": group["params"]} for group, old in pairs]
        each = {
            parameter: _holder(group, state_dict["state"].get(key, {}).get("history", ()))
            for group, old in zip(groups, saved, strict=True)
            for parameter, key in zip(group["params"], old["params"], strict=True)
        }
        together = state_dict["state"].get(_GLOBAL)
        self._together = self._together if together is None else _holder(self.defaults, together)
        self._each.update(each)
        for group, loaded in zip(self.parameter_groups, groups, strict=True):
            group.update(loaded)


class OptimizerWithClipping(torch.optim.Optimizer):
    """An optimizer that clips before each step. Its state includes the clipper's state.

    All other attributes are those of the wrapped optimizer.
    """

    # GradScaler must unscale the gradients before the step, also for fused optimizers, because clipping comes between.
    _step_supports_amp_scaling = False

    def __init__(self, optimizer: torch.optim.Optimizer, clipper: QuantileClip) -> None:
        self.optimizer = optimizer
        self.clipper = clipper

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Clip, then step. If a closure computes the gradients, clip after each call of the closure."""
        if closure is None:
            self.clipper.step()
            return self.optimizer.step()

        def clipped_after() -> float:
            loss = closure()
            self.clipper.step()
            return loss

        return self.optimizer.step(closure=clipped_after)

    def add_param_group(self, param_group: Group, **settings: Any) -> None:
        """Add a group to the optimizer and the clipper. `settings` go to `QuantileClip.add_param_group`."""
        self.optimizer.add_param_group(param_group)
        self.clipper.add_param_group({"params": param_group["params"]}, **settings)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return both states, under "optimizer" and "clipper"."""
        return {"optimizer": self.optimizer.state_dict(), "clipper": self.clipper.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load both states."""
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
    window = check_window("history_length", settings["history_length"])
    given = settings["quantile"]
    quantile = float(given) if isinstance(given, torch.Tensor) else given  # `torch.quantile` takes tensors, too
    return QuantileThreshold(factor=1.0, quantile=quantile, window=window)


def _holder(settings: Group, norms: Iterable[Any]) -> AdaptiveNorm:
    """Return an `AdaptiveNorm` with the saved norms as its history. `norms` has the oldest first."""
    max_norm = AdaptiveNorm(_rule(settings))
    listed = [float(norm) for norm in norms]
    counts = {"steps": len(listed), "clipped": 0, "skipped": 0}
    dtype = "float64" if getattr(norms, "dtype", None) == torch.float64 else "float32"
    newest = {"ord": 2.0, "dtype": dtype, "norms": listed[::-1], "norm": None, "threshold": None}
    max_norm.load_state_dict({**newest, **counts})
    return max_norm


def _norms(max_norm: AdaptiveNorm) -> torch.Tensor:
    state = max_norm.state_dict()
    return torch.tensor(state["norms"][::-1], dtype=getattr(torch, state["dtype"]))


def _check_parameters(params: list[Any], known: Mapping[torch.Tensor, object]) -> None:
    for parameter in params:
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(
                f"QuantileClip clips the gradients of tensors, got {type(parameter).__name__}. Pass model.parameters()."
            )
        if not parameter.is_leaf:
            raise ValueError("a tensor computed from others has no gradient to clip. Pass parameters.")
    if len(set(params)) < len(params) or not known.keys().isdisjoint(params):
        raise ValueError("a parameter occurs twice, in one group or in two. Pass each parameter once.")
