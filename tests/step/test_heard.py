"""What a guard hears of, and how PyTorch is left when it is gone."""

import gc
import weakref

import pytest
import torch
from torch.nn import utils
from torch.nn.utils import clip_grad

import gradclip
from gradclip._src.core import announced
from gradclip._src.step import heard
from gradclip.integrations.torch import clip_in_backward

PLACES = [(owner, name) for owner, name, _ in heard._PLACES]


class Ear:
    """Hears of all calls."""

    _watching = True
    _clips = False

    def __init__(self, optimizer=None):
        self._optimizer, self.calls, self.told = optimizer, [], []

    def _clipped(self, call):
        self.calls.append(call)

    def _stepping(self, scaler, outer):
        self.told.append("stepping")

    def _stepped(self, scaler, *, failed):
        self.told.append("failed" if failed else "stepped")


@pytest.fixture
def ear():
    one = Ear()
    heard.watch(one)
    yield one
    heard.unwatch(one)


def weight(*gradient):
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor(gradient or [3.0, 4.0])
    return parameter


def test_pytorch_is_left_as_it_was():
    gc.collect()  # optimizers of other tests, whose steps listen
    before = [getattr(owner, name) for owner, name in PLACES]
    one, other = Ear(), Ear()
    heard.watch(one)
    heard.watch(other)
    assert all(getattr(owner, name) is not old for (owner, name), old in zip(PLACES, before, strict=True))
    heard.unwatch(one)
    assert clip_grad._clip_grads_with_norm_ is not before[0]
    heard.unwatch(other)
    assert [getattr(owner, name) for owner, name in PLACES] == before
    assert announced.listeners == []


@pytest.mark.filterwarnings("ignore")
def test_a_watcher_may_vanish_while_a_call_is_compiled():
    torch.compiler.reset()
    gc.collect()
    watchers = [Ear()]
    heard.watch(watchers[0])

    def backend(module, inputs):
        watchers.clear()
        gc.collect()
        return module.forward

    parameter = weight()
    norm = torch.compile(gradclip.clip_grad_norm_, backend=backend, fullgraph=True)([parameter], 1.0)
    assert not watchers
    assert float(norm) == 5.0
    assert parameter.grad.tolist() == pytest.approx([0.6, 0.8])
    gradclip.clip_grad_norm_([weight()], 1.0)
    assert announced.listeners == []


def test_pytorch_is_left_as_it_was_when_an_optimizer_is_gone():
    gc.collect()
    before = clip_grad._clip_grads_with_norm_
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gone = weakref.ref(gradclip.guard(optimizer))
    assert clip_grad._clip_grads_with_norm_ is not before
    del model, optimizer
    gc.collect()
    assert gone() is None
    assert clip_grad._clip_grads_with_norm_ is before


def test_what_somebody_else_has_wrapped_since_stays(monkeypatch):
    one = Ear()
    heard.watch(one)
    inner = clip_grad.clip_grad_value_
    monkeypatch.setattr(clip_grad, "clip_grad_value_", lambda *args: inner(*args))
    wrapped = clip_grad.clip_grad_value_
    heard.unwatch(one)
    assert clip_grad.clip_grad_value_ is wrapped
    parameter = weight()
    clip_grad.clip_grad_value_([parameter], 1.0)
    assert (parameter.grad.tolist(), one.calls) == ([1.0, 1.0], [])


@pytest.mark.parametrize("listed", [list, tuple, iter], ids=str)
def test_calls_of_pytorch(ear, listed):
    parameters = [weight(), weight(0.0, 12.0)]
    norm = utils.clip_grad_norm_(listed(parameters), 6.5)
    assert (float(norm), parameters[1].grad[1]) == (13.0, pytest.approx(6.0))
    utils.clip_grads_with_norm_(listed(parameters), 1.0, torch.tensor(6.5))
    utils.clip_grad_value_(listed(parameters), 0.25)
    first, second, third = ear.calls
    assert (first.function, first.max_norm, float(first.norm), first.filled) == ("clip_grad_norm_", 6.5, 13.0, 2)
    assert (float(second.norm), second.max_norm) == (6.5, 1.0)
    assert (third.function, third.max_norm, third.norm) == ("clip_grad_value_", 0.25, None)
    for call in ear.calls:
        assert [id(one) for one in call.parameters] == list(map(id, parameters))
        assert (call.order, call.in_backward) == (None, False)
    assert parameters[0].grad.abs().max() <= 0.25


def test_calls_of_gradclip(ear):
    parameter = weight()
    gradclip.clip_grad_norm_([parameter], 1.0, float("inf"), nonfinite="zero")
    gradclip.clip_grad_layer_norm_([parameter], 0.5)
    gradclip.clip_grad_norm_({"name": parameter, "none": weight()}, 1.0)
    gradclip.clip_grad_norm_({"tree": parameter.grad.numpy()}, 1.0)
    by_norm, by_layer, by_name, tree = ear.calls
    assert (float(by_norm.norm), by_norm.order, by_norm.nonfinite) == (4.0, float("inf"), "zero")
    assert (by_layer.norm, by_layer.order, by_layer.max_norm) == (None, None, 0.5)
    assert by_name.parameters[0] is parameter
    assert len(tree.parameters) == 1  # it is no call without parameters


def test_calls_within_a_backward_pass(ear):
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.register_post_accumulate_grad_hook(lambda one: gradclip.clip_grad_layer_norm_([one], 1.0) and None)
    parameter.sum().backward()
    assert [call.in_backward for call in ear.calls] == [True]


def test_calls_by_the_hooks_of_clip_in_backward(ear):
    parameter = torch.nn.Parameter(torch.ones(2))
    clip_in_backward([parameter], 1.0)
    parameter.sum().backward()
    (call,) = ear.calls
    assert (call.function, call.max_norm, call.in_backward) == ("clip_grad_norm_", 1.0, True)
    assert call.parameters[0] is parameter


def test_steps_of_a_scaler():
    parameter = weight()
    optimizer, other = (torch.optim.SGD([parameter], lr=0.1) for _ in range(2))
    ear = Ear(optimizer)
    heard.watch(ear)
    for one, enabled in ((optimizer, True), (other, True), (optimizer, False)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=enabled)
        scaler.scale(parameter.sum()).backward()
        scaler.step(one)
    heard.unwatch(ear)
    assert ear.told == ["stepping", "stepped"]


def test_a_step_of_a_scaler_that_fails_is_over():
    parameter = weight()
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), torch.amp.GradScaler("cpu")
    ear = Ear(optimizer)
    heard.watch(ear)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)
    heard.unwatch(ear)
    assert ear.told == ["stepping", "stepped", "stepping", "failed"]
