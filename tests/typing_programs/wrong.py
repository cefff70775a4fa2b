"""Lines that end in `# wrong` must be errors, and no others: names, keywords, words, thresholds and results."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import gradclip
from gradclip import clip_grad_nrom_  # wrong
from gradclip.integrations.torch import clip_gradnorm_  # wrong
from gradclip.typing import Policy, Polisy  # wrong

Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def names(model: nn.Module, tree: dict[str, Array]) -> None:
    gradclip.clip_grad_nrom_(model.parameters(), 1.0)  # wrong
    gradclip.clip_by_globalnorm(tree, 1.0)  # wrong
    gradclip.Moniter()  # wrong
    gradclip.lightning  # wrong
    gradclip.typing.Polcy  # wrong
    gradclip.integrations.pytorch  # wrong
    gradclip.integrations.torch.clip_norm  # wrong
    gradclip.Monitor().advice()  # wrong
    gradclip.check_update(tree, 1.0).okay  # wrong


def keywords(model: nn.Module, tree: dict[str, Array]) -> None:
    gradclip.clip_grad_norm_(model.parameters(), 1.0, norm_type=2.0)  # wrong
    gradclip.clip_grad_norm_(model.parameters(), max_nrom=1.0)  # wrong
    gradclip.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)  # wrong
    gradclip.clip_by_global_norm(tree, clip_norm=1.0)  # wrong
    gradclip.clip_grad_layer_norm_(model.parameters(), 1.0, monitr=None)  # wrong
    gradclip.clip_grad_norm_(model.parameters())  # wrong
    gradclip.clip_by_global_norm(tree)  # wrong
    gradclip.PoissonBatches(1000, 0.1, steps=60, padding=4)  # wrong


def words(model: nn.Module, tree: dict[str, Array], name: str) -> None:
    gradclip.clip_grad_norm_(model.parameters(), 1.0, nonfinite="ignore")  # wrong
    gradclip.clip_grad_norm_(model.parameters(), 1.0, nonfinite="skip")  # wrong
    gradclip.clip_by_global_norm(tree, 1.0, nonfinite="bogus")  # wrong
    gradclip.clip_by_global_norm(tree, 1.0, nonfinite=name)  # wrong
    gradclip.clip_by_global_norm(tree, 1.0, ord="two")  # wrong
    gradclip.clip_by_global_norm(tree, 1.0, integers="leave")  # wrong
    gradclip.clip_grad_unit_norm_(model.parameters(), 1.0, unit_axis="rows")  # wrong
    gradclip.per_example_clip(tree, 1.0, rule="clp")  # wrong
    gradclip.per_example_clip(tree, 1.0, sum_dtype="float16")  # wrong
    gradclip.clipped_grad(max, 1.0, method="map")  # wrong
    gradclip.clipped_grad(max, 1.0, unit="client")  # wrong
    gradclip.clipped_fun(max, 1.0).sensitivity("swap")  # wrong
    gradclip.clipped_sum_sensitivity(1.0, layout=gradclip.SumLayout(summed_in="bfloat16"))  # wrong
    gradclip.Sensitivity(1.0, "client", relation="zero_out")  # wrong


def thresholds(model: nn.Module, tree: dict[str, Array]) -> None:
    gradclip.clip_grad_norm_(model.parameters(), "1.0")  # wrong
    gradclip.clip_grad_norm_(model.parameters(), None)  # wrong
    gradclip.clip_by_global_norm(tree, "1.0")  # wrong
    gradclip.clip_by_layer_norm(tree, "1.0")  # wrong
    gradclip.clip_by_layer_norm(tree, lambda name: 1.0)  # wrong
    gradclip.clip_grad_value_(model.parameters(), [1.0])  # wrong
    gradclip.clip_grad_layer_norm_(model.parameters(), "1.0")  # wrong
    gradclip.per_example_clip(tree, "1.0")  # wrong
    gradclip.AdaptiveThreshold("spread")  # wrong
    gradclip.AdaptiveThreshold(skip_above="5")  # wrong


def what_is_given(model: nn.Module, optimizer: torch.optim.Optimizer, tree: dict[str, Array]) -> None:
    gradclip.clip_grad_norm_(3, 1.0)  # wrong
    gradclip.clip_grad_norm_(model.parameters, 1.0)  # wrong
    gradclip.clip_grad_norm_(model.parameters(), 1.0, monitor=True)  # wrong
    gradclip.guard(model.parameters(), 1.0)  # wrong
    gradclip.clip_at_step(optimizer, 1.0, scope="layers")  # wrong
    gradclip.clip_at_step(optimizer, 1.0, nonfinite="drop")  # wrong
    gradclip.clip_at_step(optimizer, 1.0, fused="always")  # wrong
    gradclip.clipped_grad(3, 1.0)  # wrong
    gradclip.per_example_clip(tree, 1.0, mask=[0.5])  # wrong
    gradclip.clip_by_global_norm(tree, 1.0, axis_name=["a"])  # wrong
    gradclip.check_sensitivity(3, tree, sensitivity=1.0)  # wrong


def results(model: nn.Module, tree: dict[str, Array], grad: Tensor) -> Any:
    a: float = gradclip.clip_grad_norm_(model.parameters(), 1.0)  # wrong
    b: dict[str, Array] = gradclip.clip_by_global_norm(tree, 1.0)  # wrong
    c: Tensor = gradclip.clip_by_global_norm(tree, 1.0)[1]  # wrong
    d: Tensor = gradclip.clip_grad_value_(model.parameters(), 1.0)  # wrong
    e: list[float] = gradclip.clip_grad_layer_norm_(model.parameters(), 1.0)  # wrong
    f: str = gradclip.norm_at_most(tree, 1.0)  # wrong
    g: list[Tensor] = gradclip.clip_by_value(grad, 1.0)  # wrong
    gradclip.clip_by_global_norm(tree, 1.0)[0].reshape(-1)  # wrong
    gradclip.clip_grad_norm_(model.parameters(), 1.0).norm_before  # wrong
    h: float = gradclip.Monitor().advise().max_norm  # wrong
    policy: Policy = "sikp"  # wrong
    return a, b, c, d, e, f, g, h, policy
