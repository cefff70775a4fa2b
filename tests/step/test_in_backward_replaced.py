"""Parameters that take the place of those that are clipped in the backward pass."""

import copy
import io

import pytest
import torch

import gradclip
from gradclip.integrations.torch import clip_in_backward


class Parts(torch.nn.Module):
    """Two parts, of which callers may use one alone."""

    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (self.one(x) + self.two(x)) * self.scale


def backward(call):
    (call(torch.ones(2, 3)) * 50.0).sum().backward()


def loaded(model):
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)


def test_weights_that_are_loaded_in_place_of_others_are_refused():
    model = Parts()
    clipping = clip_in_backward(model, 1.0)
    loaded(model)
    for call in (model, model.two):
        with pytest.raises(RuntimeError, match=r"two\.weight.*replaced since"):
            backward(call)
    with torch.no_grad():
        model(torch.ones(2, 3))
    clipping.remove()
    clip_in_backward(model, 1.0)
    backward(model)
    assert float(gradclip.grad_norm(model.parameters())) <= 1.0


@pytest.mark.parametrize("name", ["one.bias", "scale"])
def test_one_that_is_replaced_is_named(name):
    model = Parts()
    clip_in_backward(model, 1.0)
    path, _, key = name.rpartition(".")
    setattr(model.get_submodule(path), key, torch.nn.Parameter(torch.ones(4)))
    with pytest.raises(RuntimeError, match=f"^{name}: added or replaced since clip_in_backward was called"):
        backward(model)


def test_a_second_call_takes_over():
    model = Parts()
    clip_in_backward(model, 1.0)
    loaded(model)
    clip_in_backward(model, 1.0)
    backward(model)
    assert 0.1 < float(gradclip.grad_norm(model.parameters())) <= 1.0


def test_what_needs_no_clipping_may_take_the_place():
    model = Parts()
    clip_in_backward(model, 1.0)
    model.one.bias = None
    model.two.bias = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    weights = {"scale": torch.full((4,), 2.0, requires_grad=True)}
    torch.func.functional_call(model, weights, torch.ones(2, 3)).sum().backward()
    del model.scale
    model.one(torch.ones(2, 3)).sum().backward()
    assert float(gradclip.grad_norm(model.parameters())) <= 1.0


def test_models_are_released():
    """The old weights are not kept alive."""
    model = Parts()
    clipping = clip_in_backward(model, 1.0)
    old = torch.utils.weak.WeakIdRef(model.one.weight)
    loaded(model)
    assert old() is None
    clipping.remove()
    backward(model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: on_disk(model)], ids=["deep copy", "file"])
def test_copies_are_not_clipped(copied):
    model = Parts()
    clip_in_backward(model, 1.0)
    loaded(model)
    other = copied(model)
    backward(other)
    assert float(gradclip.grad_norm(other.parameters())) > 100.0


def on_disk(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_compiled_models_are_clipped():
    torch._dynamo.reset()
    model = Parts()
    clip_in_backward(model, 1.0)
    backward(torch.compile(model, backend="eager", fullgraph=True))
    assert 0.1 < float(gradclip.grad_norm(model.parameters())) <= 1.0
