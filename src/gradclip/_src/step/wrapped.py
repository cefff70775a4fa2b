"""Find the optimizer whose step updates the parameters, where another is wrapped around it, and its step's closure."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim import Optimizer

_INNER = ("optimizer", "base_optimizer", "_base_optimizer", "original_optimizer", "optim", "base")
"""What wrappers call the optimizer that they step."""
_ENGINES = ("deepspeed", "megatron")
_OF_DEEPSPEED = (
    "_take_model_step",
    "clip_fp32_gradients",
    "get_global_grad_norm",
    "was_step_applied",
    "gradient_clipping",
    "zero_optimization",
)
_NAMES: WeakKeyDictionary[Optimizer, dict[int, tuple[str, ref[Any]]]] = WeakKeyDictionary()
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
"""What PyTorch gives an optimizer whose class calls the `__init__` of its base."""


def unwrapped(optimizer: object) -> Optimizer:
    """Return the optimizer that steps, where others are wrapped around it. Raises TypeError if no step of it is seen.

    Of what only has an optimizer, such as a learning rate scheduler, that optimizer is returned.
    If the inner optimizer has only some of the parameters, the outer one is returned, where its steps can be seen: in
    PyTorch's ZeroRedundancyOptimizer, the inner one has the share of this process.
    """
    found = optimizer
    for inner in _chain(optimizer):
        if of_engine(type(found)):
            raise TypeError(_refusal(optimizer, _OF_ENGINES))
        if isinstance(getattr(found, "param_groups", None), list) and not parameters_of(found) <= parameters_of(inner):
            if _has_hooks(found):
                break
            raise TypeError(_refusal(optimizer, _OF_SEVERAL))
        found = inner
    if isinstance(found, Optimizer) and _has_hooks(found):
        return found
    if isinstance(found, Optimizer):
        advice = (
            "Its class does not call Optimizer.__init__, so its steps have no hooks, and none of its attributes "
            f"{', '.join(_INNER)} is an optimizer. Pass the optimizer whose step updates the parameters."
        )
    elif isinstance(optimizer, tuple):
        advice = "Of what deepspeed.initialize returns, pass the first entry, the engine."
    elif hasattr(optimizer, "step"):
        advice = f"If it wraps an optimizer, pass that one. {_OF_ENGINES}"
    else:
        advice = "To clip the gradients of parameters, call gradclip.clip_grad_norm_(parameters, max_norm)."
    raise TypeError(_refusal(optimizer, advice))


_OF_SEVERAL = (
    "The optimizer in it has only some of its parameters, and its own steps have no hooks. Pass each optimizer that it "
    "steps; they clip separately."
)
_OF_ENGINES = (
    "Engines step by themselves: for them, call gradclip.clip_at_step with the engine that deepspeed.initialize "
    "returns, or with what Megatron's get_megatron_optimizer returns."
)


def of_engine(kind: type) -> bool:
    """Say whether a class is one of a training engine, or derives from one."""
    return any(base.__module__.partition(".")[0] in _ENGINES for base in kind.__mro__)


def is_deepspeed(given: object) -> bool:
    """Say whether something is a DeepSpeed engine."""
    return all(hasattr(type(given), name) for name in _OF_DEEPSPEED)


def is_megatron(given: object) -> bool:
    """Say whether something is an optimizer of Megatron-Core, or steps by a configuration like one."""
    if not callable(getattr(given, "step", None)) or not any(True for _ in configurations(given)):
        return False
    return of_engine(type(given)) or not (isinstance(given, Optimizer) or any(True for _ in _chain(given)))


def configurations(optimizer: object) -> Iterator[Any]:
    """Yield what an optimizer of Megatron-Core, and each that is chained in it, reads its threshold from."""
    config = getattr(optimizer, "config", None)
    if hasattr(config, "clip_grad"):
        yield config
    for one in getattr(optimizer, "chained_optimizers", None) or ():
        yield from configurations(one)


def _refusal(optimizer: object, advice: str) -> str:
    kind = type(optimizer).__name__
    return f"optimizer must be an optimizer of torch.optim, or a wrapper around one, got {kind}. {advice}"


def _chain(optimizer: object) -> Iterator[Any]:
    """Yield the optimizer inside, the one inside that, and so on."""
    passed: list[object] = []
    found: Any = optimizer
    while found is not None and not any(found is one for one in passed):
        passed.append(found)
        found = next((inner for name in _INNER if _steps(inner := getattr(found, name, None))), None)
        if found is not None:
            yield found


def _steps(found: object) -> bool:
    return isinstance(found, Optimizer) or (
        isinstance(getattr(found, "param_groups", None), list) and callable(getattr(found, "step", None))
    )


def _has_hooks(optimizer: Any) -> bool:
    return all(name in vars(optimizer) for name in _HOOKS)


_RUNNERS: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
"""The hook before an optimizer's step that runs the step itself, which must come after all others."""


def put_runner_last(optimizer: Optimizer, runner: int | None = None) -> None:
    """Move the hook that runs the step itself behind all others, if there is one."""
    if runner is not None:
        _RUNNERS[optimizer] = runner
    hooks = optimizer._optimizer_step_pre_hooks
    if (found := _RUNNERS.get(optimizer)) in hooks:
        hooks.move_to_end(found)


def last_before_runner(optimizer: Optimizer) -> int | None:
    """Return the last hook before the step, but for one that runs the step itself."""
    runner = _RUNNERS.get(optimizer)
    return next((one for one in reversed(optimizer._optimizer_step_pre_hooks) if one != runner), None)


def name_parameters(optimizer: object, named: Iterable[tuple[str, Any]]) -> None:
    """Name the parameters of an optimizer whose groups have no names."""
    _NAMES[unwrapped(optimizer)] = {id(parameter): (name, ref(parameter)) for name, parameter in named}


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups without the optimizer's own settings, some of which look like ours, with names."""
    own = optimizer.defaults.keys() - {"params", "param_names"}
    groups = [{key: value for key, value in group.items() if key not in own} for group in optimizer.param_groups]
    if (names := _NAMES.get(optimizer)) is not None:
        for group in groups:
            found = ((one, *names.get(id(one), (None, None))) for one in group["params"])
            group.setdefault("param_names", [name if known and known() is one else None for one, name, known in found])
    return groups


def parameters_of(optimizer: Any) -> set[int]:
    """Return the identities of the parameters of an optimizer."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


Closure = Callable[..., Any]


def with_closure(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], wrap: Callable[[Closure], Closure]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of a step, its closure wrapped and all others as they are; None if it has no closure.

    The first of `args` is the optimizer, as hooks before a step get them.
    """
    if callable(named := kwargs.get("closure")):
        return args, {**kwargs, "closure": wrap(named)}
    place = _place(type(args[0]).step)
    if len(args) > place and callable(args[place]) and not isinstance(args[place], torch.nn.Module):
        return (*args[:place], wrap(args[place]), *args[place + 1 :]), dict(kwargs)
    return None


@lru_cache(maxsize=64)
def _place(step: Callable[..., Any]) -> int:
    """Return at which place a step takes its closure: the first behind the optimizer, if none has that name."""
    names = list(inspect.signature(step).parameters)
    return names.index("closure") if "closure" in names else 1
