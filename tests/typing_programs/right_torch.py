"""Programs for PyTorch that type checkers must accept, with the types that they must tell."""

from collections.abc import Callable, Iterator
from typing import Any, assert_type

import torch
from torch import Tensor, nn

import gradclip
from gradclip.typing import ClippedInBackward, EngineClipping, HasGrad, Policy, StepClipping, StepGuard, Threshold


def one_model(model: nn.Module) -> float:
    norm = gradclip.clip_grad_norm_(model.parameters(), 1.0)
    assert_type(norm, Tensor)
    return norm.item() if norm.isfinite() else 0.0


def names_and_patterns(model: nn.Module) -> Tensor:
    gradclip.clip_grad_norm_(model.named_parameters(), {"encoder.*": 1.0, "*": None})
    return gradclip.clip_grad_norm_(dict(model.named_parameters()), 1, where=["*.weight"], integers="raise")


def listed(model: nn.Module, weight: nn.Parameter) -> None:
    assert_type(gradclip.clip_grad_norm_(list(model.parameters()), 0.5, float("inf")), Tensor)
    assert_type(gradclip.clip_grad_norm_(weight, 0.5, ord="inf"), Tensor)
    assert_type(gradclip.grad_norm(weight), Tensor)
    assert_type(gradclip.grad_norm(model.parameters(), 1), Tensor)


def groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    gradclip.clip_grad_norm_(optimizer.param_groups, 1.0)
    gradclip.clip_grad_norm_([{"params": model.parameters(), "max_norm": 2.0}], 1.0)


def a_tensor_as_threshold(model: nn.Module, max_norm: Tensor) -> Tensor:
    return gradclip.clip_grad_norm_(model.parameters(), max_norm, nonfinite="zero")


def an_adaptive_threshold(model: nn.Module, monitor: gradclip.Monitor) -> Tensor:
    max_norm = gradclip.AdaptiveThreshold(gradclip.SteadyRule(), skip_above=10.0)
    return gradclip.clip_grad_norm_(model.parameters(), max_norm, monitor=monitor)


def processes(model: nn.Module, group: torch.distributed.ProcessGroup) -> Tensor:
    return gradclip.clip_grad_norm_(model.parameters(), 1.0, process_group=[group], nonfinite="raise")


def layers(model: nn.Module) -> list[Tensor | None]:
    norms = gradclip.clip_grad_layer_norm_(model.parameters(), 1.0)
    assert_type(norms, list[Tensor | None])
    gradclip.clip_grad_layer_norm_(model.parameters(), [1.0, 2.0])
    return norms


def units(model: nn.Module) -> list[Tensor | None]:
    assert_type(gradclip.clip_grad_unit_norm_(model.parameters(), 1.0, unit_axis=0), list[Tensor | None])
    return gradclip.adaptive_grad_clip_(model.parameters(), 0.01, unit_axis=0, monitor=gradclip.Monitor())


def values(model: nn.Module) -> None:
    gradclip.clip_grad_value_(model.parameters(), 0.5)


def a_tree(grads: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    assert_type(gradclip.global_norm(grads), Tensor)
    return gradclip.clip_by_global_norm(grads, 1.0)


def one_array(grad: Tensor) -> Tensor:
    clipped, norm = gradclip.clip_by_global_norm(grad, 1.0, ord=1)
    assert_type(norm, Tensor)
    return gradclip.clip_by_value(clipped, 0.1)


def by_threshold(model: nn.Module, max_norm: Threshold, policy: Policy) -> Tensor:
    return gradclip.clip_grad_norm_(model.parameters(), max_norm, nonfinite=policy)


def any_parameters(parameters: Iterator[HasGrad[Any]]) -> None:
    gradclip.clip_grad_norm_(parameters, 1.0)


def a_function(clip: Callable[[Iterator[nn.Parameter], float], Tensor], model: nn.Module) -> Tensor:
    return clip(model.parameters(), 1.0)


def passed_on(model: nn.Module) -> Tensor:
    return a_function(gradclip.clip_grad_norm_, model)


def guarded(optimizer: torch.optim.Optimizer) -> StepGuard:
    return gradclip.guard(optimizer, 1.0, on_mistake="raise")


def library(model: nn.Module) -> Tensor:
    from gradclip.integrations.torch import clip_grad_norm_

    return clip_grad_norm_(model.parameters(), 1.0, norm_type=2.0, error_if_nonfinite=True)


def library_without_its_import(model: nn.Module, max_norm: gradclip.typing.Threshold) -> Tensor:
    gradclip.integrations.torch.clip_grad_value_(model.parameters(), 0.5)
    return gradclip.integrations.torch.get_total_norm(list(model.parameters()))


def in_opacus(model: nn.Module, optimizer: torch.optim.SGD, loader: torch.utils.data.DataLoader[Tensor]) -> Any:
    engine = gradclip.integrations.opacus.PrivacyEngine(accountant="rdp")
    return engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )


def in_backward(model: nn.Module) -> ClippedInBackward:
    from gradclip.integrations.torch import clip_in_backward

    clip_in_backward(model, {"encoder.*": 1.0, "*": None})
    return clip_in_backward(model, 1.0, where="encoder.*", monitor=gradclip.Monitor())


def per_example(model: nn.Module, x: Tensor) -> Any:
    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        summed: Tensor = torch.func.functional_call(model, params, (x,)).sum()
        return summed

    return gradclip.clipped_grad(loss, 1.0)(dict(model.named_parameters()), x)


def at_each_step(optimizer: torch.optim.Optimizer) -> StepClipping | EngineClipping:
    with gradclip.clip_at_step(optimizer, {"*.bias": 1.0, "*": None}, nonfinite="skip", fused=False) as handle:
        handle.numbers()
    return gradclip.clip_at_step(optimizer, 0.01, scope="agc", eps=1e-3, unit_axis=0, monitor=gradclip.Monitor())
