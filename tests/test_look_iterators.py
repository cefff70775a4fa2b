"""Iterators of parameters are read once, though several takes look at them."""

import pytest
import torch

import gradclip


def test_a_generator_is_read_once():
    model = torch.nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    norm = gradclip.grad_norm(list(model.parameters()))
    assert float(gradclip.clip_grad_norm_(model.parameters(), 0.5)) == float(norm)
    assert float(gradclip.grad_norm(model.parameters())) <= 0.5
    used_up = model.parameters()
    list(used_up)
    with pytest.raises(ValueError, match="used up"):
        gradclip.clip_grad_norm_(used_up, 1.0)


def test_an_iterator_is_read_once_though_a_spike_is_clipped_twice():
    given, holder = torch.nn.Parameter(torch.zeros(4)), gradclip.AdaptiveThreshold(skip_above=2.0)
    given.grad = torch.ones(4)
    gradclip.clip_grad_norm_(iter([given]), holder)
    given.grad = torch.full((4,), 100.0)
    assert gradclip.clip_grad_norm_(iter([given]), holder).item() == 200.0
    assert given.grad.tolist() == [0.0] * 4
