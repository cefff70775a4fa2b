"""Parameters of training engines, which hold gradients elsewhere than in `.grad`."""

from types import SimpleNamespace

import pytest
import torch

import gradclip
from gradclip import clip_at_step
from gradclip.integrations.torch import clip_grad_norm_

CALLS = {
    "grad_norm": gradclip.grad_norm,
    "clip_grad_norm_": lambda p: gradclip.clip_grad_norm_(p, 1.0),
    "adaptive": lambda p: gradclip.clip_grad_norm_(p, gradclip.AdaptiveThreshold()),
    "monitored": lambda p: gradclip.clip_grad_norm_(p, 1.0, monitor=gradclip.Monitor(layers_every=1)),
    "clip_grad_value_": lambda p: gradclip.clip_grad_value_(p, 1.0),
    "clip_grad_layer_norm_": lambda p: gradclip.clip_grad_layer_norm_(p, 1.0),
    "clip_grad_unit_norm_": lambda p: gradclip.clip_grad_unit_norm_(p, 1.0),
    "adaptive_grad_clip_": gradclip.adaptive_grad_clip_,
    "drop-in": lambda p: clip_grad_norm_(p, 1.0),
}


def held(**marks):
    """Return a parameter without a `.grad`, marked as engines mark it."""
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    for name, value in marks.items():
        setattr(parameter, name, value)
    return parameter


def with_gradient():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    return parameter


@pytest.mark.after_error
@pytest.mark.parametrize(
    ("marks", "advice"),
    [
        ({"ds_id": 0}, r"DeepSpeed holds .*gradclip\.clip_at_step\(engine, max_norm\)"),
        ({"_hp_mapping": None}, "DeepSpeed holds"),
        ({"main_grad": torch.ones(2, 3)}, r"in \.main_grad, .*gradclip\.clip_at_step\(optimizer, max_norm\)"),
    ],
)
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_gradient_that_an_engine_holds(call, beside, marks, advice):
    given = [with_gradient(), held(**marks)] if beside else [held(**marks)]
    with pytest.raises(ValueError, match=rf"parameters\[{len(given) - 1}\] has no .grad: .*{advice}"):
        call(given)
    assert all(p.grad is None or p.grad.tolist() == [3.0, 4.0] for p in given)


@pytest.mark.after_error
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_grad_that_the_engine_has_taken(call):
    given = [with_gradient(), with_gradient()]
    for parameter in given:
        parameter._hp_grad = parameter.grad.double()
    with pytest.raises(ValueError, match=r"parameters\[0\] has a \.grad that is not used: DeepSpeed holds"):
        call(given)
    assert all(p.grad.tolist() == [3.0, 4.0] for p in given)


def test_the_name_of_the_parameter_is_told():
    with pytest.raises(ValueError, match=r"^head\.weight has no \.grad"):
        gradclip.clip_grad_norm_({"head.weight": held(ds_id=3)}, 1.0)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("folded", [True, "auto"])
def test_a_step_is_refused(folded, fused):
    weight = held(main_grad=torch.ones(2, 3))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused or folded is True)
    clip_at_step(optimizer, 1.0, fused=folded)
    with pytest.raises(ValueError, match=r"lies in \.main_grad"):
        optimizer.step()


def test_what_an_engine_has_put_into_grad_is_clipped():
    given = with_gradient()
    given.ds_id, given.main_grad, given._hp_mapping = 1, torch.ones(2), None
    frozen = held(ds_id=2).requires_grad_(False)
    without = held(main_grad=None)
    assert gradclip.clip_grad_norm_([given, frozen, without], 1.0) == 5.0
    torch.testing.assert_close(given.grad, torch.tensor([0.6, 0.8]))


def test_the_advice_for_main_grad_works():
    weight = held(main_grad=torch.full((2, 3), 2.0))
    norm = gradclip.clip_grad_norm_([SimpleNamespace(grad=p.main_grad) for p in [weight]], 1.0)
    torch.testing.assert_close(norm, torch.tensor(24.0**0.5))
    torch.testing.assert_close(weight.main_grad, torch.full((2, 3), 2.0 / 24.0**0.5))
