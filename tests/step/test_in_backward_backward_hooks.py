"""Models that change after `clip_in_backward`: what is unfrozen is clipped, and another call clips what is new."""

import copy

import pytest
import torch

import gradclip
from gradclip.integrations.torch import clip_in_backward
from rational import at_most


def network(**frozen):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    model[0].requires_grad_(not frozen.get("first", False))
    return model


def backward(model):
    model.zero_grad()
    x = torch.ones(2, 3, dtype=next(model.parameters()).dtype)
    (model(x) * 50.0).sum().backward()


def norm(model):
    return float(gradclip.grad_norm(model.parameters()))


def within(model, threshold):
    return at_most([p.grad.double().numpy() for p in model.parameters() if p.grad is not None], 2, threshold)


FORMS = [lambda model: model, lambda model: list(model.parameters()), lambda model: dict(model.named_parameters())]


@pytest.mark.parametrize("form", FORMS, ids=["module", "list", "dict"])
def test_what_is_unfrozen_later_is_clipped_and_has_a_share(form):
    model = network(first=True)
    clipping = clip_in_backward(form(model), 0.5)
    assert len(clipping.thresholds) == 2
    backward(model)
    assert 0.3 < norm(model) <= 0.5
    model[0].requires_grad_(True)
    backward(model)
    assert 0.3 < norm(model) <= 0.5
    assert within(model, 0.5)
    assert len(clipping.thresholds) == 4
    expected = clip_in_backward(network(), 0.5).thresholds.values()
    assert list(clipping.thresholds.values()) == list(expected)


def test_what_is_frozen_later_leaves_its_share_to_others():
    model = network()
    clipping = clip_in_backward(model, 0.5)
    backward(model)
    model[0].requires_grad_(False)
    model.zero_grad()
    assert clipping.thresholds == clip_in_backward(network(first=True), 0.5).thresholds


def test_frozen_parameters_stay_frozen():
    model = network(first=True)
    model.register_parameter("count", torch.nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False))
    clip_in_backward(model, 0.5)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["2.weight", "2.bias"]
    assert not hasattr(model.count, "_post_accumulate_grad_hooks") or not model.count._post_accumulate_grad_hooks


def test_an_unfrozen_parameter_needs_a_threshold_by_name():
    model = network(first=True)
    thresholds = {"2.weight": 0.5, "2.bias": 0.1}
    clip_in_backward(model, thresholds)
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"^0\.\w+ requires a gradient, and max_norm has no threshold for it"):
        backward(model)
    clip_in_backward(model, thresholds | {"0.weight": 0.3, "0.bias": 0.2})
    backward(model)
    for name, threshold in (thresholds | {"0.weight": 0.3, "0.bias": 0.2}).items():
        assert float(gradclip.grad_norm(dict(model.named_parameters())[name])) <= threshold


def test_a_frozen_parameter_may_have_a_threshold_by_name():
    model = network(first=True)
    clipping = clip_in_backward(model, {name: 0.1 for name, _ in model.named_parameters()})
    assert set(clipping.thresholds) == {"2.weight", "2.bias"}
    model[0].requires_grad_(True)
    backward(model)
    assert set(clipping.norms) == {name for name, _ in model.named_parameters()}


def test_a_layer_added_later_is_told_and_clipped_after_another_call():
    model = network()
    first = clip_in_backward(model, 0.5)
    model.append(torch.nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"^3\.weight, 3\.bias: added or replaced"):
        backward(model)
    second = clip_in_backward(model, 0.5)
    backward(model)
    assert 0.3 < norm(model) <= 0.5
    assert within(model, 0.5)
    assert set(second.norms) == set(second.thresholds) == {name for name, _ in model.named_parameters()}
    first.remove()
    backward(model)
    assert norm(model) <= 0.5
    second.remove()
    backward(model)
    assert norm(model) > 5.0


def test_a_frozen_layer_added_later_needs_nothing_until_it_is_unfrozen():
    model = network()
    clip_in_backward(model, 0.5)
    model.append(torch.nn.Linear(2, 2).requires_grad_(False))
    backward(model)
    model[3].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"^3\.weight, 3\.bias: added or replaced"):
        backward(model)


def test_the_last_call_counts_and_its_hooks_stay_before_those_that_step():
    model = network()
    first = clip_in_backward(model, 0.5)
    got = {}
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: got.update({name: float(gradclip.grad_norm(p))}))
    for max_norm in (0.5, 0.01):
        second = clip_in_backward(model, max_norm)
        backward(model)
        assert all(got[name] <= second.thresholds[name] for name in got)
        assert norm(model) == pytest.approx(max_norm)
    assert first.norms == {}


def test_a_call_for_a_part_takes_only_that_over():
    model = network()
    whole = clip_in_backward(model, 0.5)
    part = clip_in_backward(model[2], 0.01)
    backward(model)
    assert norm(model[2]) == pytest.approx(0.01)
    assert norm(model[0]) == pytest.approx(0.5)
    assert set(whole.norms) == {"0.weight", "0.bias"}
    assert set(part.norms) == {"weight", "bias"}


@pytest.fixture
def swapping():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_model_converted_by_swapping_is_clipped_and_stepped(times):
    model = network()
    clip_in_backward(model, 0.5)
    stepped = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: stepped.append(float(gradclip.grad_norm(p))))
    backward(model)
    model.zero_grad()
    for time in range(times):
        model.to(torch.float32 if time % 2 else torch.float64)
        model.load_state_dict(copy.deepcopy(model.state_dict()))
    stepped.clear()
    backward(model)
    assert 0.3 < norm(model) <= 0.5
    assert len(stepped) == 4
    assert max(stepped) <= 0.5


@pytest.mark.usefixtures("swapping")
def test_a_second_call_clips_what_was_swapped():
    model = network()
    clip_in_backward(model, 0.5)
    model.double()
    clip_in_backward(list(model.parameters()), 0.5)
    backward(model)
    assert 0.3 < norm(model) <= 0.5


def test_a_parameter_that_is_parametrized_later_is_clipped():
    model = network()
    clipping = clip_in_backward(model, 0.5)
    torch.nn.utils.parametrize.register_parametrization(model[0], "weight", torch.nn.Identity())
    backward(model)
    assert 0.3 < norm(model) <= 0.5
    assert set(clipping.norms) == set(clipping.thresholds)


def test_a_module_that_is_dropped_leaves_its_parts_clipped():
    model = network(first=True)
    clip_in_backward(torch.nn.ModuleList(model), 0.5)
    model[0].requires_grad_(True)
    backward(model)
    assert 0.3 < norm(model) <= 0.5


def test_what_has_left_the_module_keeps_its_share_for_a_pass():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    clipping = clip_in_backward(model, 1.0)
    left = model.pop(0)
    every = [*model.parameters(), *left.parameters()]
    for _ in range(2):
        (model(left(torch.full((2, 4), 50.0))) ** 2).sum().backward()
        assert 0.99 < torch.cat([p.grad.flatten() for p in every]).norm() <= 1.0
        for p in every:
            p.grad = None
    assert len(clipping.thresholds) == 4


def test_what_has_left_and_gets_no_gradient_leaves_its_share_to_others():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    clipping = clip_in_backward(model, 1.0)
    model.pop(1)
    norms = []
    for _ in range(2):
        (model(torch.full((2, 4), 50.0)) ** 2).sum().backward()
        norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())
        model.zero_grad()
    assert norms[0] < 0.8
    assert 0.99 < norms[1] <= 1.0
    assert len(clipping.thresholds) == 2


class Walked(torch.nn.Sequential):
    """Counts how often its parts are looked through."""

    walks = 0

    def named_modules(self, *args, **kwargs):
        self.walks += 1
        return super().named_modules(*args, **kwargs)


def test_a_pass_looks_through_the_module_once_however_many_parameters_have_left():
    model = Walked(*(torch.nn.Linear(2, 2) for _ in range(6)))
    clip_in_backward(model, 1.0)
    left = [model.pop(0) for _ in range(4)]
    walks = []
    for _ in range(3):
        before = model.walks
        sum((part(torch.ones(1, 2)) ** 2).sum() for part in [*left, *model]).backward()
        walks.append(model.walks - before)
    assert walks == [1, 1, 1]
