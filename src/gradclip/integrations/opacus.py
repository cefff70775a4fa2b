"""A drop-in replacement for `opacus.PrivacyEngine`, and the optimizers that it makes, for Opacus 1.6.

To switch, import `PrivacyEngine` from here. The wrapper of the model, the data loader, the accountant and so epsilon
are Opacus' own. What the optimizer does with the gradients of the examples is gradclip's:

- Each example is clipped to at most `max_grad_norm`, in exact arithmetic and for every finite gradient. Opacus divides
  by the norm plus 1e-6, and drops an example if its norm overflows float32.
- Sums and noise are float64, also over virtual steps, accumulated batches and processes. They are rounded to the dtype
  of the parameters once, after the division.
- The noise covers the rounding of the sum.
- An example with NaN or infinities adds nothing, and a warning says how many there were.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from gradclip._src.backends.imported import needed_for
from gradclip.integrations._opacus_ghost import (
    GhostCriterion,
    GhostDPOptimizer,
    GhostLoss,  # noqa: F401  # pickles name it here
    GhostModule,
)
from gradclip.integrations._opacus_optimizers import (
    AdaClipDPOptimizer,
    DistributedDPOptimizer,
    DPOptimizer,
    DPPerLayerOptimizer,
    SimpleDistributedPerLayerOptimizer,
)

with needed_for("opacus", "torch"):
    import opacus
    import torch
    from opacus import optimizers
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
    from opacus.grad_sample import GradSampleModuleExpandedWeights
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "AdaClipDPOptimizer",
    "DPOptimizer",
    "DPPerLayerOptimizer",
    "DistributedDPOptimizer",
    "PrivacyEngine",
    "SimpleDistributedPerLayerOptimizer",
]

T = TypeVar("T", bound=Callable[..., Any])

_BY_FUNCTORCH = "ft_compute_sample_grad"
"""The attribute of a layer in which Opacus keeps how functorch makes its gradients."""
_MODES = ("hooks", "functorch", "ew", "ghost")
_KINDS: dict[tuple[str, bool], type[DPOptimizer]] = {
    ("flat", False): DPOptimizer,
    ("per_layer", False): DPPerLayerOptimizer,
    ("adaptive", False): AdaClipDPOptimizer,
    ("flat", True): DistributedDPOptimizer,
    ("per_layer", True): SimpleDistributedPerLayerOptimizer,
}


def _documented_as(original: Callable[..., Any]) -> Callable[[T], T]:
    """Return `wraps` of a method, so that type checkers still see a method."""
    return wraps(original)  # type: ignore[return-value]


class PrivacyEngine(opacus.PrivacyEngine):
    """`opacus.PrivacyEngine` whose optimizers clip, add up and add noise with gradclip.

    Arguments, methods and results are those of Opacus. `clipping` may be "flat", "per_layer" or "adaptive", over
    several processes "flat" or "per_layer". `grad_sample_mode` may be "hooks", "functorch", "ew" or "ghost".

    With "ghost", `make_private` returns model, optimizer, criterion and data loader, as Opacus does. Norms and sums are
    those of `gradclip.clipped_grad`: any layers, tied ones included, and no large gradients of examples. Write
    `criterion(model(x), y).backward()`, with nothing in between.

    Raises:
        NotImplementedError: by `make_private`, for modules under FSDP; for adaptive clipping over several processes;
            for "ghost" over several processes, without a wrapper, with a batch on axis 1 or with `clipping` other than
            "flat".
    """

    @_documented_as(opacus.PrivacyEngine.make_private)
    def make_private(
        self, *, module: torch.nn.Module, clipping: str = "flat", grad_sample_mode: str = "hooks", **rest: object
    ) -> Any:
        """Return the wrapped module, our optimizer and the data loader, as Opacus does."""
        _check_supported(module, clipping, grad_sample_mode)
        if grad_sample_mode == "ghost":
            _check_ghost(module, clipping, rest)
        made = super().make_private(module=module, clipping=clipping, grad_sample_mode=grad_sample_mode, **rest)
        made[1].names = {p: name for name, p in module.named_parameters()}
        return made

    @_documented_as(opacus.PrivacyEngine._prepare_model)
    def _prepare_model(self, module: torch.nn.Module, *, grad_sample_mode: str = "hooks", **rest: Any) -> Any:
        if grad_sample_mode != "ghost":
            made = super()._prepare_model(module, grad_sample_mode=grad_sample_mode, **rest)
            _allow_empty_batches(module)
            return _ExpandedWeights.of(made) if type(made) is GradSampleModuleExpandedWeights else made
        self.validate(module=module, optimizer=None, data_loader=None)
        return GhostModule(module, loss_reduction=rest["loss_reduction"])

    def _prepare_criterion(
        self,
        *,
        module: GhostModule,
        optimizer: GhostDPOptimizer,
        criterion: Callable[..., Any],
        loss_reduction: str = "mean",
        **settings: object,
    ) -> GhostCriterion:
        return GhostCriterion(module, optimizer, criterion, loss_reduction)

    def _prepare_optimizer(
        self,
        *,
        optimizer: torch.optim.Optimizer,
        distributed: bool = False,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        **settings: object,
    ) -> DPOptimizer:
        plain = optimizer.original_optimizer if isinstance(optimizer, optimizers.DPOptimizer) else optimizer
        generator = self.secure_rng if self.secure_mode else noise_generator
        kind = GhostDPOptimizer if grad_sample_mode == "ghost" else _KINDS[clipping, distributed]
        return kind(plain, generator=generator, secure_mode=self.secure_mode, **settings)


class _ExpandedWeights(GradSampleModuleExpandedWeights):
    """The wrapper of "ew". Poisson sampling makes empty batches, for which PyTorch has no gradients of examples."""

    @classmethod
    def of(cls, made: GradSampleModuleExpandedWeights) -> "_ExpandedWeights":
        """Return this wrapper of the same module."""
        return cls(made._module, batch_first=made.batch_first, loss_reduction=made.loss_reduction)

    def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> Any:
        """Call the model. An empty batch has the gradients of no examples."""
        if len(x):
            return super().forward(x, *args, **kwargs)
        if self.training and torch.is_grad_enabled():
            for p in self._module.parameters():
                if p.requires_grad and p.grad_sample is None:
                    p.grad_sample = p.detach().new_zeros(0, *p.shape)
        return self._module(x, *args, **kwargs)


def _allow_empty_batches(module: torch.nn.Module) -> None:
    """Make functorch's gradients of examples work for none: not every operation takes an empty batch under vmap."""
    for layer in module.modules():
        if (found := vars(layer).get(_BY_FUNCTORCH)) is not None and not isinstance(found, _OfExamples):
            setattr(layer, _BY_FUNCTORCH, _OfExamples(found))


class _OfExamples(NamedTuple):
    """The gradients of a layer's parameters for each example, by functorch."""

    by_functorch: Callable[..., Any]

    def __call__(self, parameters: list[torch.Tensor], activations: torch.Tensor, backprops: torch.Tensor) -> Any:
        if len(backprops):
            return self.by_functorch(parameters, activations, backprops)
        return [p.detach().new_zeros(0, *p.shape) for p in parameters]


def _check_supported(module: torch.nn.Module, clipping: str, grad_sample_mode: str) -> None:
    """Raise before anything is wrapped."""
    if grad_sample_mode not in _MODES:
        raise NotImplementedError(f"grad_sample_mode={grad_sample_mode!r} is not supported. Pass one of {_MODES}.")
    distributed = _is_distributed(module)
    if isinstance(module, FSDPModule):
        raise NotImplementedError(
            "gradclip's PrivacyEngine does not support modules under FSDP. Pass the module in "
            "opacus.distributed.DifferentiallyPrivateDistributedDataParallel."
        )
    if not isinstance(clipping, str) or (clipping, distributed) not in _KINDS:
        known = sorted(kind for kind, over_processes in _KINDS if over_processes is distributed)
        where = "over several processes" if distributed else "in one process"
        raise NotImplementedError(f"clipping={clipping!r} is not supported {where}. Pass one of {known}.")


def _check_ghost(module: torch.nn.Module, clipping: str, settings: Mapping[str, object]) -> None:
    """Raise for settings that "ghost" does not have, before anything is wrapped."""
    found = {
        "several processes": _is_distributed(module),
        f"clipping={clipping!r}": clipping != "flat",
        "batch_first=False": not settings.get("batch_first", True),
        "wrap_model=False": not settings.get("wrap_model", True),
    }
    wrong = next((name for name, holds in found.items() if holds), "")
    if wrong:
        raise NotImplementedError(f"grad_sample_mode='ghost' does not support {wrong}. Pass grad_sample_mode='hooks'.")


def _is_distributed(module: object) -> bool:
    return isinstance(module, DifferentiallyPrivateDistributedDataParallel | DistributedDataParallel)
