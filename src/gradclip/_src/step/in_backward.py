"""Clip each PyTorch gradient as soon as the backward pass finishes it, for optimizers that step within that pass."""

import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from gradclip._src import look
from gradclip._src.annotations import Ord, Parameters, Policy, Threshold, Where
from gradclip._src.backends import any_distributed
from gradclip._src.core import announced
from gradclip._src.core.nonfinite import Nonfinite
from gradclip._src.core.norms import Order
from gradclip._src.inplace.gradients import chosen
from gradclip._src.inplace.norm import clip_grad_norm_
from gradclip._src.monitor.monitor import Monitor
from gradclip._src.passed.arguments import check_monitor
from gradclip._src.passed.leaves import Choice, choice_of
from gradclip._src.passed.parameters import ParameterList
from gradclip._src.public import public_in, record
from gradclip._src.step.attached import Attached, as_passed, many
from gradclip._src.step.handle import check_free, claim
from gradclip._src.step.heard import current_pass
from gradclip._src.step.passes import PassesWatched
from gradclip._src.step.shares import Shares, of_patterns, shared
from gradclip._src.step.within import with_memory_of_its_own
from gradclip._src.words import listed, with_advice


@record
class ClippedInBackward(Attached):
    """Clipping of parameters in the backward pass, until `remove()`, or until another call takes all of them over.

    Attributes:
        norms: the norm of each gradient before clipping, by parameter name, from its last backward pass.
        passes: the number of backward passes in which it has clipped or left gradients as they are.

    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        shares: Shares,
        order: Order,
        nonfinite: Policy,
        module: torch.nn.Module | None,
        max_norm: object,
        choice: Choice,
        watched: PassesWatched | None,
    ) -> None:
        self.norms: dict[str, torch.Tensor] = {}
        self.passes = 0
        self._told = as_passed(max_norm)
        self._shares, self._order, self._nonfinite = shares, order, nonfinite
        self._watched, self._choice = watched, replace(choice, alone=False)
        self._needs_names = Nonfinite.named(nonfinite).raises  # only for the error: they cost time
        self._names = frozenset(parameters)
        # Hooks hold this object, so it must not hold the parameters: they would never be freed.
        self._modules = [] if module is None else [weakref.ref(one) for one in module.modules()]
        self._alone = {} if module is not None else {name: weakref.ref(one) for name, one in parameters.items()}
        self._sizes: dict[str, int] = {}
        self._elsewhere: dict[str, int] = {}
        self._missing: dict[str, int | None] = {}  # in which pass a parameter was first not in the module
        self._thresholds: Mapping[str, float] = {}
        self._pass_seen: int | None = None
        self._hooks: set[ClippingHook] = set()
        for name, parameter in parameters.items():
            self._attach(name, parameter)
        self._watches = [] if module is None else list(_watches(self, module))
        self._look()

    @property
    def thresholds(self) -> Mapping[str, float]:
        """The threshold of each parameter that requires a gradient, by name."""
        self._look()
        return self._thresholds

    def remove(self) -> None:
        """Stop clipping: backward passes leave the gradients unchanged."""
        self._look()
        for hook in (*self._hooks, *self._watches):
            hook.remove()
        self._hooks.clear()
        self._watches.clear()

    _called = "ClippedInBackward"

    def _says(self) -> Sequence[str]:
        passes = f"{self.passes} pass" if self.passes == 1 else f"{self.passes} passes"
        return many(len(self._names), "parameter"), self._told, "scope='layer'", passes

    @property
    def _is_removed(self) -> bool:
        return not self._hooks

    def _chooses(self, name: str) -> bool:
        """Say whether a parameter of this name counts."""
        return not self._choice.left([name])

    def _follows(self, given: object) -> bool:
        """Return whether it clips, and records the norms in what is given, a `Monitor`."""
        return bool(self._hooks) and self._watched is not None and given is self._watched.monitor

    def _clips(self) -> set[int]:
        """Return the identities of the parameters that it clips."""
        return {id(parameter) for _, parameter in self._now()}

    def _clip(self, name: str, parameter: torch.Tensor) -> None:
        """Clip a gradient that is finished."""
        grad = parameter.grad  # held: PyTorch would make another Python object each time it is asked
        if grad is not None and grad.requires_grad:
            raise RuntimeError(
                f"the gradient of {name} has a graph (create_graph=True), but clipping in the backward pass is not "
                "differentiable. Call remove(), and gradclip.clip_by_global_norm on the gradients."
            )
        before, self._pass_seen = self._pass_seen, current_pass()
        if before != self._pass_seen:
            self.passes += 1
            self._look(in_pass=True)
        if name in self._missing or name not in self._sizes:  # it has left the module
            self._elsewhere[name] = parameter.numel()
            self._missing.pop(name, None)
            if name not in self._sizes:  # else it has kept its share for this pass
                self._look()
        if name not in self._thresholds:
            raise RuntimeError(
                f"{name} requires a gradient, and max_norm has no threshold for it. Call clip_in_backward again, with "
                "one. To leave it unclipped, pass math.inf."
            )
        with_memory_of_its_own(parameter)
        try:
            norm = self.norms[name] = self._clipped(name, parameter)
        except FloatingPointError:
            if self._watched is not None:
                self._watched.missed(name, parameter)
            raise
        if self._watched is not None:
            self._watched.add(name, norm, self._thresholds[name])

    def _clipped(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """Clip one gradient, in one look if that settles it and nobody listens to calls; return its norm."""
        threshold = self._thresholds[name]
        norm = None if announced.listeners else look.clip_alone_(parameter, threshold, self._order)
        if norm is not None:
            return norm
        given: Parameters = {name: parameter} if self._needs_names else [parameter]
        return clip_grad_norm_(given, threshold, self._order, nonfinite=self._nonfinite)

    def _attach(self, name: str, parameter: torch.Tensor) -> None:
        hook = hook_of(parameter)
        if hook is None:
            made = ClippingHook(self, name, parameter)
            if made.handle is not None:
                self._hooks.add(made)
            return
        # The hook stays before those that step.
        hook.revive(parameter)
        hook.clipping._release(hook)
        hook.clipping, hook.name = self, name
        self._hooks.add(hook)

    def _release(self, hook: "ClippingHook") -> None:
        """Leave a parameter to another object."""
        self._hooks.discard(hook)
        self._alone.pop(hook.name, None)
        self._sizes = {name: size for name, size in self._sizes.items() if name != hook.name}
        self._thresholds = self._shares(self._sizes) if self._sizes else {}
        if not self._hooks:
            self.remove()

    def _look(self, *, in_pass: bool = False) -> None:
        """Find out which parameters require a gradient now, and share the threshold among them."""
        if not self._hooks:
            return
        now = dict(self._now())
        sizes = {name: one.numel() for name, one in now.items() if one.requires_grad}
        sizes |= {name: size for name, size in self._elsewhere.items() if name not in sizes}
        sizes |= {name: self._sizes[name] for name in self._may_come(now, in_pass=in_pass)}
        if sizes and sizes != self._sizes:  # without any, the module is gone
            self._sizes, self._thresholds = sizes, self._shares(sizes)

    def _may_come(self, now: Mapping[str, torch.Tensor], *, in_pass: bool) -> list[str]:
        """Return the names that have left the module, but may get a gradient: for one pass they keep their share."""
        self._missing = {name: seen for name, seen in self._missing.items() if name not in now}
        left = [name for name in self._sizes if name not in now and name not in self._elsewhere]
        if in_pass:
            self._missing |= {name: self._pass_seen for name in left if name not in self._missing}
        return [name for name in left if self._missing.get(name, self._pass_seen) == self._pass_seen]

    def _now(self) -> Iterator[tuple[str, torch.Tensor]]:
        alone = ((name, reference()) for name, reference in self._alone.items())
        yield from ((name, one) for name, one in alone if one is not None)
        alive = [module for reference in self._modules if (module := reference()) is not None]
        root = self._modules[0]() if self._modules else None
        for path, part in root.named_modules() if root is not None else (("", one) for one in alive):
            for name, parameter in _own(path, part):
                hook = hook_of(parameter)
                if hook is not None and hook.clipping is self:
                    yield hook.name, parameter
                elif hook is None and name in self._names:  # FSDP2 has gathered it
                    yield name, parameter


class ClippingHook:
    """Clips the gradient of one parameter when it is finished.

    Attributes:
        clipping: what it belongs to.
        name: the parameter's name there.
        handle: removes it; None if PyTorch lets the parameter have no hook.

    """

    def __init__(self, clipping: ClippedInBackward, name: str, parameter: Any) -> None:
        self.clipping, self.name = clipping, name
        self.handle = _registered(parameter, self)
        self._content: int = parameter._cdata

    def __call__(self, parameter: torch.Tensor) -> None:
        self.clipping._clip(self.name, parameter)

    def remove(self) -> None:
        """Clip no more."""
        self.handle.remove()

    def revive(self, parameter: Any) -> None:
        """Let PyTorch call the hooks of a parameter again, if it may have got another content, which has none.

        `torch.utils.swap_tensors` does that. After two of them, the content may lie at the first address again.
        """
        if parameter._cdata != self._content or torch.__future__.get_swap_module_params_on_conversion():
            parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
            self._content = parameter._cdata


def hook_of(parameter: Any) -> ClippingHook | None:
    """Return the hook that clips a parameter, if there is one."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return next((hook for hook in hooks.values() if isinstance(hook, ClippingHook)), None)


def _registered(parameter: torch.Tensor, hook: ClippingHook) -> Any:
    """Let PyTorch call the hook, also of a frozen parameter, unless that is one of integers and the like."""
    if parameter.requires_grad:
        return parameter.register_post_accumulate_grad_hook(hook)
    try:
        return parameter.requires_grad_(True).register_post_accumulate_grad_hook(hook)
    except RuntimeError:
        return None
    finally:
        parameter.requires_grad_(False)


class _ForwardPreHook:
    """Called before a module's forward pass: raises if it has parameters that are not clipped."""

    def __init__(self, clipping: ClippedInBackward, prefix: str, sharded: frozenset[str], *, deep: bool) -> None:
        self._clipping, self._prefix, self._sharded, self._deep = clipping, prefix, sharded, deep

    def __call__(self, module: torch.nn.Module, _inputs: Any) -> None:
        # Compiled code cannot run this check.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if self._deep:
            self._clipping._pass_seen = None
        parts = module.modules() if self._deep else (module,)
        if all(_is_clipped(one) for part in parts for one in part._parameters.values()):
            return
        named = module.named_modules(prefix=self._prefix) if self._deep else ((self._prefix, module),)
        missed = [name for path, part in named for name, one in _own(path, part) if self._misses(name, one)]
        if missed:
            raise RuntimeError(
                f"{listed(missed)}: added or replaced since clip_in_backward was called, so the gradients would not be "
                "clipped. load_state_dict(assign=True), fully_shard and others make new parameters. Call "
                "clip_in_backward after them: it may be called again."
            )

    def _misses(self, name: str, parameter: torch.Tensor) -> bool:
        # During its forward pass, FSDP2 puts gathered parameters in the place of the sharded ones, which stay clipped.
        gathered = name in self._sharded and not any_distributed([parameter])
        return not (gathered or _is_clipped(parameter)) and self._clipping._chooses(name)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies of the module, also on disk, are not clipped.
        return NotClipped, ()


@public_in("integrations.torch")
class NotClipped:
    """Stands in copies of a module, also in files, for what `clip_in_backward` has added. It does nothing."""

    def __call__(self, _module: torch.nn.Module, _inputs: Any) -> None:
        """Do nothing."""


def _watches(clipping: ClippedInBackward, root: torch.nn.Module) -> Iterator[Any]:
    """Check all parameters when the module is called, and those of each part when only that is called."""
    sharded = frozenset(
        name for path, part in root.named_modules() for name, one in _own(path, part) if any_distributed([one])
    )
    for path, module in root.named_modules():
        watch = _ForwardPreHook(clipping, path, sharded, deep=module is root)
        yield module.register_forward_pre_hook(watch)


def _own(path: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((f"{path}.{key}".removeprefix("."), p) for key, p in module._parameters.items() if p is not None)


def _is_clipped(parameter: torch.Tensor | None) -> bool:
    """Say whether a parameter gets no gradient, or one that is clipped."""
    if not isinstance(parameter, torch.nn.Parameter) or not parameter.requires_grad:
        return True
    hook = hook_of(parameter)
    if hook is not None:
        hook.revive(parameter)
    return hook is not None


@public_in("integrations.torch")
@with_advice
def clip_in_backward(
    parameters: torch.nn.Module | Parameters,
    max_norm: Threshold | Mapping[str, Threshold | None],
    *,
    ord: Ord = 2,
    nonfinite: Policy = "propagate",
    monitor: Monitor | None = None,
    where: Where = None,
) -> ClippedInBackward:
    """Make the backward pass clip the gradient of each parameter as soon as it is finished.

    The threshold of parameter k is max_norm * (D_k / D)**(1 / ord): D_k is its number of elements, D that of all
    parameters. So the global norm of all gradients is at most `max_norm`, although they need not exist at the same
    time.

    Args:
        parameters: a module, or its parameters as `gradclip.clip_grad_norm_` accepts them. Frozen parameters have no
            share, and get one when you unfreeze them. A parameter listed twice counts once. If names occur twice, the
            second "w" is called "w (2)". Pass the module rather than a list: only then are parameters noticed that are
            added or replaced.
        max_norm: the threshold of the global norm. A dict maps patterns of names to thresholds, as in
            `gradclip.clip_grad_norm_`: the parameters of one pattern share its threshold, so that their norm is at most
            that. Frozen parameters need none.
        ord: which norm, as in `gradclip.global_norm`, except `-inf`.
        nonfinite: "propagate", "raise", "zero" or "drop", applied to each parameter separately.
        monitor: a `gradclip.Monitor` that records a step at the end of each backward pass, as in
            `gradclip.clip_grad_layer_norm_`: the norm that is the largest multiple of its threshold, and that
            threshold. A checkpoint with `use_reentrant=True` has backward passes of its own.
        where: the gradients that count, as in `gradclip.clip_grad_norm_`. All others are not clipped, and have no
            share of the threshold.

    Returns:
        A `ClippedInBackward`: `.norms` has the norms before clipping and `.thresholds` the thresholds, both by name.
        Call `.remove()` to stop, or use it in a `with`.

    Raises:
        ValueError: no parameter requires a gradient; a parameter is computed from others, or already has hooks that run
            after its gradient is accumulated; names do not match; a threshold is negative or NaN.
        TypeError: a parameter is not a tensor, or thresholds by name are given for parameters without names. There is
            no `integers=`, because a backward pass makes no gradients of integers.
        FloatingPointError: in the backward pass with `nonfinite="raise"`, a gradient contains NaN or infinity.
        RuntimeError: in a backward pass with `create_graph=True`, or of a parameter that was frozen and has no
            threshold by name; in a forward pass of the module, if parameters have been added, or replaced, as
            `load_state_dict(assign=True)` and `fully_shard` do.

    You may call this again, also while optimizers step in the backward pass: the last call counts. It clips what is new
    as well, and takes the other parameters over.

    Call this before anything that makes optimizers step in the backward pass: hooks run in the order of registration.
    With optimizers like that, `clip_grad_norm_` after the pass is too late: no gradients are left.

    The bound of each gradient is that of `gradclip.clip_grad_norm_`, and the thresholds, each to the power ord, add up
    to at most max_norm**ord in exact arithmetic. If gradients accumulate over several passes, each pass clips the sum
    so far. With DistributedDataParallel, each process clips its own gradients before they are averaged.

    This uses `torch.Tensor.register_post_accumulate_grad_hook` of PyTorch 2.13.

    >>> import torch
    >>> model = torch.nn.ParameterDict({"v": torch.ones(2), "w": torch.ones(2)})
    >>> clipping = clip_in_backward(model, {"v": 1.0, "w": 5.0})
    >>> x = torch.tensor([3.0, 4.0])
    >>> (model["v"] @ x + model["w"] @ x).backward()
    >>> model["v"].grad, model["w"].grad, clipping.norms["v"]
    (tensor([0.6000, 0.8000]), tensor([3., 4.]), tensor(5.))

    """
    order, policy, choice = Order.parse(ord), Nonfinite.named(nonfinite), choice_of(where, "keep")
    check_monitor(monitor)
    if order.p < 0:
        raise ValueError("ord must not be -inf: clipping parts by it does not bound the global norm. Pass 2, 1 or inf.")
    module = parameters if isinstance(parameters, torch.nn.Module) else None
    by_name, named = _found(parameters, choice)
    if isinstance(max_norm, Mapping) and not named:
        raise TypeError("thresholds by name need named parameters. Pass the model, or model.named_parameters().")
    by = of_patterns(max_norm, by_name, order) if isinstance(max_norm, Mapping) else shared(max_norm, order)
    watched = None
    if monitor is not None:
        check_free(monitor, set(map(id, by_name.values())))
        watched = PassesWatched(monitor, list(by_name), order, policy)
    clipping = ClippedInBackward(by_name, by, order, nonfinite, module, max_norm, choice, watched)
    claim(monitor, clipping)
    return clipping


def _found(parameters: torch.nn.Module | Parameters, choice: Choice) -> tuple[dict[str, torch.Tensor], bool]:
    """Return the parameters that count by name, without duplicates, and whether they came with names."""
    if isinstance(parameters, torch.nn.Module):
        _reshard(parameters)
        parameters = dict(parameters.named_parameters(remove_duplicate=False))
    params = chosen(ParameterList.of(parameters), choice, alone=True)
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for index, parameter in enumerate(params.parameters):
        name = params.name(index)
        _check(parameter, name)
        if id(parameter) not in seen:
            found[_free(name, found)] = parameter
            seen.add(id(parameter))
    if not any(one.requires_grad for one in found.values()):
        raise ValueError(
            "no parameter requires a gradient, so the backward pass has nothing to clip. Pass parameters with "
            "requires_grad=True, such as model.parameters()."
        )
    return found, bool(params.names) and None not in params.names


def _reshard(module: torch.nn.Module) -> None:
    """Let FSDP2 put back the sharded parameters, which get the gradients, in place of those it gathered to compute."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for part in module.modules():
        if isinstance(part, fsdp.FSDPModule):
            part.reshard()


def _free(name: str, taken: Mapping[str, Any]) -> str:
    """Return the name, with a number if another parameter already has it."""
    numbered = (name if number == 1 else f"{name} ({number})" for number in count(1))
    return next(one for one in numbered if one not in taken)


def _check(parameter: Any, name: str) -> None:
    if not isinstance(parameter, torch.Tensor):
        raise TypeError(f"{name} is of type {type(parameter).__name__}. Only PyTorch tensors have a backward pass.")
    if not parameter.is_leaf:
        raise ValueError(
            f"{name} is computed from other tensors, so no gradient accumulates in it. Pass the tensors it is computed "
            "from."
        )
    hooks = (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
    others = not all(getattr(hook, "only_watches", False) for hook in hooks)
    if others and parameter.requires_grad and hook_of(parameter) is None:
        raise ValueError(
            f"{name} already has hooks that run after its gradient is accumulated. If one steps an optimizer, it would "
            "do so before the gradient is clipped. Call clip_in_backward before registering other hooks."
        )
