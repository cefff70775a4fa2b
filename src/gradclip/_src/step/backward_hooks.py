"""The hooks that clip each gradient as it is finished, and those that look for parameters which have none."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from gradclip._src import look
from gradclip._src.backends import any_distributed
from gradclip._src.core import announced
from gradclip._src.core.nonfinite import Nonfinite
from gradclip._src.core.norms import Order
from gradclip._src.inplace.norm import clip_grad_norm_
from gradclip._src.step.heard import current_pass
from gradclip._src.step.optimizers import with_memory_of_its_own
from gradclip._src.words import listed
from gradclip.typing import Parameters, Policy

Shares = Callable[[Mapping[str, int]], Mapping[str, float]]
"""Returns the thresholds of parameters from their numbers of elements, both by name."""


class ClippedInBackward:
    """Clipping of parameters in the backward pass, until `remove()`, or until another call takes all of them over.

    Attributes:
        norms: the norm of each gradient before clipping, by parameter name, from its last backward pass.

    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        shares: Shares,
        order: Order,
        nonfinite: Policy,
        module: torch.nn.Module | None,
    ) -> None:
        self.norms: dict[str, torch.Tensor] = {}
        self._shares, self._order, self._nonfinite = shares, order, nonfinite
        self._needs_names = Nonfinite.named(nonfinite).raises  # only for the error: they cost time
        self._names = frozenset(parameters)
        # Hooks hold this object, so it must not hold the parameters: they would never be freed.
        self._modules = [] if module is None else [weakref.ref(one) for one in module.modules()]
        self._alone = {} if module is not None else {name: weakref.ref(one) for name, one in parameters.items()}
        self._sizes: dict[str, int] = {}
        self._elsewhere: dict[str, int] = {}
        self._missing: dict[str, int | None] = {}  # in which pass a parameter was first not in the module
        self._thresholds: Mapping[str, float] = {}
        self.pass_seen: int | None = None
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

    def clip(self, name: str, parameter: torch.Tensor) -> None:
        """Clip a gradient that is finished."""
        grad = parameter.grad  # held: PyTorch would make another Python object each time it is asked
        if grad is not None and grad.requires_grad:
            raise RuntimeError(
                f"the gradient of {name} has a graph (create_graph=True), but clipping in the backward pass is not "
                "differentiable. Call remove(), and gradclip.clip_by_global_norm on the gradients."
            )
        before, self.pass_seen = self.pass_seen, current_pass()
        if before != self.pass_seen:
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
        self.norms[name] = self._clipped(name, parameter)

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
        hook.clipping.release(hook)
        hook.clipping, hook.name = self, name
        self._hooks.add(hook)

    def release(self, hook: "ClippingHook") -> None:
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
            self._missing |= {name: self.pass_seen for name in left if name not in self._missing}
        return [name for name in left if self._missing.get(name, self.pass_seen) == self.pass_seen]

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
        self.clipping.clip(self.name, parameter)

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
            self._clipping.pass_seen = None
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
        return not (gathered or _is_clipped(parameter))

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies of the module, also on disk, are not clipped.
        return _ignore_call, ()


def _ignore_call() -> Any:
    return _ignored


def _ignored(_module: torch.nn.Module, _inputs: Any) -> None:
    """Take the place of a `_ForwardPreHook` in copies of a module."""


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
