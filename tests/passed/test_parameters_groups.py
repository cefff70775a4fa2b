"""Keys of parameter groups: those of optimizers are left alone, those that would set clipping are refused."""

import inspect

import pytest
import torch

import gradclip
from gradclip import clip_at_step
from gradclip._src.inplace.norm import clip_grads_with_norm_
from gradclip.integrations import torch as of_torch
from gradclip.integrations.torch import clip_in_backward

SCHEDULERS = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, 5),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 1.0),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.1),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
}


def weight():
    made = torch.nn.Parameter(torch.zeros(2, 2))
    made.grad = torch.tensor([[3.0, 0.0], [4.0, 0.0]])
    return made


def optimizers():
    kinds = (kind for _, kind in inspect.getmembers(torch.optim, inspect.isclass))
    found = [kind for kind in kinds if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer]
    assert len(found) > 12
    return found


@pytest.mark.parametrize("kind", optimizers(), ids=lambda kind: kind.__name__)
def test_groups_of_optimizers(kind):
    named = list({"w": weight()}.items())
    for listed in (lambda: [weight()], lambda: named):
        groups = kind(listed(), lr=0.1).param_groups
        assert gradclip.clip_grad_norm_(groups, 5.0) == 5.0


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_groups_with_keys_of_schedulers(make):
    optimizer = torch.optim.SGD([weight()], lr=0.1, momentum=0.9)
    make(optimizer)
    assert gradclip.grad_norm(optimizer.param_groups) == 5.0


@pytest.mark.parametrize(
    "keys",
    [
        {"lr": 0.1, "max_grad_norm": 1.0, "trust_clip": False, "grad_averaging": True},  # LAMB
        {"lr": 0.1, "clip_threshold": 1.0, "decay_rate": -0.8, "scale_parameter": True},  # Adafactor
        {"lr": 0.1, "clipping_threshold": 1.0, "min_dim_size_to_factor": 32},  # another Adafactor
        {"lr": 0.1, "clip_lambda": None, "normalize": True, "norm_eps": 1e-8, "rank": 4, "use_muon": True},
        {
            "lr_scale": 0.5,
            "weight_decay": 0.0,
            "name": "norm layers",
            "param_names": ["w"],
            "order": 3,
            "layer_norm": True,
        },
    ],
)
def test_keys_of_other_optimizers(keys):
    assert gradclip.grad_norm([{"params": [weight()], **keys}]) == 5.0


REFUSED = [
    *("clip_grad", "clip_norm", "clipnorm", "clip_value", "clipping", "gradient_clip_val", "grad_clip"),
    *("clip_grad_max_norm", "norm_type", "ord", "nonfinite", "error_if_nonfinite", "skip_above", "max_gradient_norm"),
    *("max_grad_norm", "gradient_clipping", "process_groups", "device_mesh", "clip_threshold"),
]


@pytest.mark.after_error
@pytest.mark.parametrize("key", REFUSED)
def test_keys_that_would_set_clipping(key):
    parameter = weight()
    groups = [{"params": [weight()]}, {"params": [parameter], key: 0.5}]
    for call in (
        gradclip.grad_norm,
        lambda p: gradclip.clip_grad_norm_(p, 1.0),
        lambda p: gradclip.clip_grad_norm_(p, gradclip.AdaptiveThreshold()),
        lambda p: gradclip.clip_grad_value_(p, 1.0),
        lambda p: gradclip.clip_grad_layer_norm_(p, 1.0),
    ):
        with pytest.raises(ValueError, match=rf"parameters\[1\] has the keys '{key}', which gradclip does not read"):
            call(groups)
        assert parameter.grad.tolist() == [[3.0, 0.0], [4.0, 0.0]]


@pytest.mark.after_error
@pytest.mark.parametrize("key", ["max_grad_norm", "clip_threshold"])
def test_no_optimizer_of_torch_reads_a_threshold_of_another(key):
    parameter = weight()
    groups = torch.optim.AdamW([{"params": [parameter], key: 0.5}]).param_groups
    with pytest.raises(ValueError, match=f"has the keys '{key}', which gradclip does not read.*under 'max_norm'"):
        gradclip.clip_grad_norm_(groups, 1.0)
    assert parameter.grad.tolist() == [[3.0, 0.0], [4.0, 0.0]]


def test_all_such_keys_of_a_group_are_named():
    groups = torch.optim.AdamW([{"params": [weight()], "grad_clip": 1.0, "clip_grad": True}]).param_groups
    with pytest.raises(ValueError, match="the keys 'grad_clip', 'clip_grad', which"):
        gradclip.clip_grad_norm_(groups, 1.0)


DO_NOT_READ_THRESHOLDS = {
    "value": lambda p: gradclip.clip_grad_value_(p, 1.0),
    "adaptive": lambda p: gradclip.adaptive_grad_clip_(p, 0.1),
    "given norm": lambda p: clip_grads_with_norm_(p, 1.0, 5.0),
    "in backward": lambda p: clip_in_backward(p, 1.0),
    "torch's clip_grad_norm_": lambda p: of_torch.clip_grad_norm_(p, 1.0),
    "torch's clip_grad_value_": lambda p: of_torch.clip_grad_value_(p, 1.0),
    "torch's clip_grads_with_norm_": lambda p: of_torch.clip_grads_with_norm_(p, 1.0, torch.tensor(5.0)),
}


@pytest.mark.after_error
@pytest.mark.parametrize("call", DO_NOT_READ_THRESHOLDS.values(), ids=DO_NOT_READ_THRESHOLDS)
@pytest.mark.parametrize("threshold", [0.5, None])
def test_functions_that_do_not_read_thresholds_of_groups_refuse_them(call, threshold):
    parameter = weight()
    groups = [{"params": [weight()]}, {"params": [parameter], "max_norm": threshold}]
    with pytest.raises(ValueError, match=r"parameters\[1\] has the key 'max_norm'.*clip_grad_norm_ reads it"):
        call(groups)
    assert parameter.grad.tolist() == [[3.0, 0.0], [4.0, 0.0]]


@pytest.mark.after_error
def test_groups_mixed_with_parameters_are_refused():
    one, other = weight(), weight()
    before = one.grad.clone()
    with pytest.raises(TypeError, match=r"parameters\[0\] is of type dict, which has no .grad"):
        gradclip.clip_grad_norm_([{"params": [one], "max_norm": 1.0}, other], 1.0)
    assert torch.equal(one.grad, before)


def test_folding_refuses_thresholds_of_groups_at_once():
    optimizer = torch.optim.SGD([{"params": [weight()], "max_norm": 1.0}], lr=0.1, fused=True)
    with pytest.raises(ValueError, match=r"a parameter group has 'max_norm', a threshold of its own"):
        clip_at_step(optimizer, 1.0, fused=True)


@pytest.mark.after_error
def test_the_drop_in_of_torch_takes_no_patterns():
    parameter = weight()
    with pytest.raises(TypeError, match="max_norm must be a real number"):
        of_torch.clip_grad_norm_([("w", parameter)], {"*": 1.0})
    assert parameter.grad.tolist() == [[3.0, 0.0], [4.0, 0.0]]
