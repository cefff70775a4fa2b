"""Attention comes in factors: one product for a fused matrix, or one for each of its parts."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tapped_torch import distance, gradients_by_loop, tapped_gradients

DTYPE = torch.float64


def last(y):
    """A loss of any result in which each element counts differently."""
    weights = torch.arange(1, y.numel() + 1, dtype=y.dtype).reshape(y.shape)
    return (torch.sin(y) * weights).sum()


class Attention(nn.Module):
    """`MultiheadAttention` of one or of several inputs."""

    def __init__(self, **settings):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True, **settings)

    def forward(self, x, key=None, value=None):
        key = x if key is None else key
        return self.inner(x, key, key if value is None else value)[0]


class Fused(nn.Module):
    """Attention by one product for query, key and value. `before`: the matrix is split, not the result."""

    def __init__(self, before):
        super().__init__()
        self.qkv, self.out, self.before = nn.Linear(8, 24, bias=False), nn.Linear(8, 8), before

    def forward(self, x):
        if self.before:
            parts = [F.linear(x, w) for w in self.qkv.weight.chunk(3)]
        else:
            parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in parts)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def checked(module, *shapes):
    """Return the uses of a module's parameters that have no reason, after a look at the gradients."""
    torch.manual_seed(0)
    module.to(DTYPE)
    params = {name: torch.randn_like(x) for name, x in module.named_parameters()}
    loss = lambda p, *x: last(torch.func.functional_call(module, p, x))
    x = [torch.randn(3, *shape, dtype=DTYPE) for shape in shapes]
    uses, result, found = tapped_gradients(loss, params, *x)
    assert distance(found, gradients_by_loop(loss, params, *x)) < 1e-10
    assert result.untapped == {}
    return {name: use.uses for name, use in uses.items() if not use.reason}


@pytest.mark.parametrize("training", [True, False])
def test_packed_attention_is_one_product(training):
    uses = checked(Attention().train(training), (1, 5, 8))
    assert {name: [use.terms for use in found] for name, found in uses.items()} == {
        "inner.in_proj_weight": [5],
        "inner.out_proj.weight": [5],
    }


def test_attention_to_another_input_uses_parts_of_the_packed_matrix():
    uses = checked(Attention(), (1, 5, 8), (1, 4, 8))["inner.in_proj_weight"]
    assert [(use.place.start, use.place.stop, use.terms) for use in uses] == [((0, 0), (8, 8), 5), ((8, 0), (24, 8), 4)]


def test_attention_to_inputs_of_other_widths():
    uses = checked(Attention(kdim=3, vdim=5), (1, 5, 8), (1, 4, 3), (1, 4, 5))
    assert {name.removeprefix("inner."): [use.terms for use in found] for name, found in uses.items()} == {
        "k_proj_weight": [4],
        "out_proj.weight": [5],
        "q_proj_weight": [5],
        "v_proj_weight": [4],
    }


@pytest.mark.parametrize(("before", "positions"), [(False, [5]), (True, [5, 5, 5])])
def test_fused_attention(before, positions):
    uses = checked(Fused(before), (1, 5, 8))
    assert [use.terms for use in uses["qkv.weight"]] == positions
    assert len({use.place for use in uses["qkv.weight"]}) == len(positions)


@pytest.mark.parametrize("training", [True, False])
def test_a_layer_of_a_transformer(training):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).train(training)
    assert sorted(checked(layer, (1, 5, 8))) == [
        "linear1.weight",
        "linear2.weight",
        "self_attn.in_proj_weight",
        "self_attn.out_proj.weight",
    ]


MASKS = {
    "none": None,
    "a row for all": torch.tensor([0.0, 1.0, -torch.inf, 2.0, 0.5], dtype=DTYPE)[None],
    "booleans": torch.arange(25).reshape(5, 5) % 7 != 3,
    "heads": torch.arange(50).reshape(2, 5, 5) % 7 != 3,
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("shape", [(2, 5, 4), (3, 2, 5, 4)], ids=["heads", "texts of heads"])
def test_attention_of_a_batch_is_that_of_each_example(mask, shape):
    loss = lambda p, x: last(F.scaled_dot_product_attention(x @ p["w"], x, x, attn_mask=mask, scale=0.3))
    torch.manual_seed(0)
    params, x = {"w": torch.randn(4, 4, dtype=DTYPE)}, torch.randn(3, *shape, dtype=DTYPE)
    _, _, found = tapped_gradients(loss, params, x)
    assert distance(found, gradients_by_loop(loss, params, x)) < 1e-10


def test_each_example_may_have_its_own_mask():
    loss = lambda p, x, m: last(F.scaled_dot_product_attention(x @ p["w"], x, x, attn_mask=m))
    torch.manual_seed(0)
    params, x = {"w": torch.randn(4, 4, dtype=DTYPE)}, torch.randn(3, 1, 2, 5, 4, dtype=DTYPE)
    for shape in ((1, 2, 5, 5), (1, 1, 1, 5), (2, 5, 5), (5, 5)):
        mask = torch.randn(3, *shape, dtype=DTYPE) > -1
        _, _, found = tapped_gradients(loss, params, x, mask)
        assert distance(found, gradients_by_loop(loss, params, x, mask)) < 1e-10


def test_dropout_of_attention_differs_between_examples():
    loss = lambda p, x: F.scaled_dot_product_attention(x @ p["w"], x, x, dropout_p=0.5).sum()
    torch.manual_seed(0)
    params, x = {"w": torch.eye(4)}, torch.ones(4, 2, 5, 4)
    _, result, _ = tapped_gradients(loss, params, x)
    assert len(set(result.values.tolist())) == 4


def test_parameters_may_be_queries():
    loss = lambda p, x: last(F.scaled_dot_product_attention(p["q"], x @ p["w"], x))
    torch.manual_seed(0)
    params = {"w": torch.randn(4, 4, dtype=DTYPE), "q": torch.randn(2, 3, 4, dtype=DTYPE)}
    x = torch.randn(3, 2, 5, 4, dtype=DTYPE)
    uses, _, found = tapped_gradients(loss, params, x)
    assert [name for name, use in uses.items() if use.reason] == ["q"]
    assert distance(found, gradients_by_loop(loss, params, x)) < 1e-10
