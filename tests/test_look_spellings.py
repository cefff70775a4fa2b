"""One look takes parameters with names, in groups, and those that are chosen, whatever is done to their gradients."""

import math
from functools import partial

import pytest
import torch

import gradclip
from fast_paths import in_full, same, settling
from gradclip._src.inplace.norm import clip_grads_with_norm_
from gradclip._src.look import Look

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CALLS = {
    "norm": gradclip.grad_norm,
    "clip_": partial(gradclip.clip_grad_norm_, max_norm=0.7),
    "clip_by_known_": partial(clip_grads_with_norm_, max_norm=0.7, total_norm=torch.tensor(3.0)),
    "clamp_": partial(gradclip.clip_grad_value_, clip_value=0.3),
}


def named(parameters):
    return {f"layer{place}.weight": one for place, one in enumerate(parameters)}


SPELLINGS = {
    "list": list,
    "generator": lambda params: (one for one in params),
    "dict": named,
    "pairs": lambda params: list(named(params).items()),
    "tuple of pairs": lambda params: tuple(named(params).items()),
    "generator of pairs": lambda params: (pair for pair in named(params).items()),
    "group": lambda params: [{"params": params}],
    "groups with names": lambda params: [
        {"params": params[:1], "param_names": ["first"]},
        {"params": params[1:], "param_names": list(named(params[1:]))},
    ],
    "groups of an optimizer": lambda params: (
        torch.optim.Adam([{"params": params[:2], "lr": 1.0}, {"params": params[2:]}]).param_groups
    ),
}


@pytest.fixture
def taken(monkeypatch):
    """Return the names of the methods that settled a call, in order."""
    return settling(monkeypatch, CALLS)


def parameters(dtypes=DTYPES, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    made = []
    for place, dtype in enumerate(dtypes):
        grad = (torch.randn(place + 1, 5, generator=generator, dtype=torch.float64) * scale).to(dtype)
        made.append(torch.nn.Parameter(torch.zeros_like(grad)))
        made[-1].grad = grad
    return made


def outcome(call, passed_as, make=parameters, **options):
    """Return what a call returns, if anything, and the gradients afterwards."""
    made = make()
    found = call(passed_as(made), **options)
    return [*([] if found is None else [found]), *(one.grad for one in made)]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", CALLS)
def test_spellings(taken, name, spelling):
    found = outcome(CALLS[name], SPELLINGS[spelling])
    assert taken == [name]
    assert name == "norm" or not all(map(same, found[-4:], [one.grad for one in parameters()]))
    for expected in in_full(outcome, CALLS[name], SPELLINGS[spelling]):
        assert all(map(same, found, expected))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_norms_of_layers_are_a_list_for_all_spellings(monkeypatch, spelling):
    frozen, trained = torch.nn.Parameter(torch.ones(2), requires_grad=False), parameters()
    settled, clip = [], Look.clip_several_
    monkeypatch.setattr(Look, "clip_several_", lambda *args: settled.append(clip(*args)) or settled[-1])
    norms = gradclip.clip_grad_layer_norm_(SPELLINGS[spelling]([frozen, *trained]), [1.0, 0.1, 2.0, 1.0, 9.0])
    assert len(settled) == 1
    assert settled[0] is not None
    assert norms[0] is None
    limits = (0.1, 2.0, 1.0, 9.0)
    for norm, limit, one, before in zip(norms[1:], limits, trained, parameters(), strict=True):
        assert float(norm) == pytest.approx(float(before.grad.float().norm()), rel=1e-3)
        assert float(one.grad.float().norm()) == pytest.approx(min(limit, float(norm)), rel=1e-2)


@pytest.mark.parametrize("name", ["clip_", "clip_by_known_", "clamp_"])
def test_chosen_parameters(taken, name):
    found = outcome(CALLS[name], named, where=["layer1.*", "layer3.*"])
    assert taken == [name]
    changed = [not same(*pair) for pair in zip(found[-4:], [one.grad for one in parameters()], strict=True)]
    assert changed == [False, True, False, True]
    for expected in in_full(outcome, CALLS[name], named, where=["layer1.*", "layer3.*"]):
        assert all(map(same, found, expected))


@pytest.mark.parametrize("name", ["clip_", "clip_by_known_", "clamp_"])
@pytest.mark.parametrize("key", ["max_grad_norm", "clip_value", "ord", "mesh_dim"])
def test_what_groups_seem_to_tell_is_refused(name, key):
    made = parameters()
    with pytest.raises(ValueError, match=f"has the keys '{key}', which gradclip does not read"):
        CALLS[name]([{"params": made, key: 1.0}])
    assert all(map(same, (one.grad for one in made), (one.grad for one in parameters())))


@pytest.mark.parametrize("name", ["clip_by_known_", "clamp_"])
def test_thresholds_of_groups_are_refused_where_they_are_not_read(name):
    with pytest.raises(ValueError, match="has the key 'max_norm', a threshold of its own"):
        CALLS[name]([{"params": parameters(), "max_norm": 1.0}])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64], ids=str)
@pytest.mark.parametrize("max_norm", [0.0, 1e-40, 1e-7, 0.7, 2.5, math.inf])
@pytest.mark.parametrize("share", [0.0, 0.3, 1 - 2**-30, 1.0, 1 + 2**-30, 1 + 2**-22, 3.0, 1e30, math.inf, math.nan])
def test_known_norms_give_the_bits_of_the_pipeline(dtype, max_norm, share):
    norm = share * max_norm
    make, call = partial(parameters, (dtype, dtype)), partial(clip_grads_with_norm_, max_norm=max_norm, total_norm=norm)
    found = outcome(call, list, make)
    for expected in in_full(outcome, call, list, make):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["clip_", "clip_by_known_", "clamp_"])
def test_a_gradient_of_two_parameters_is_written_once(taken, name):
    def both():
        made = parameters((torch.float32,))
        other = torch.nn.Parameter(torch.zeros(1, 5))
        other.grad = made[0].grad
        return [*made, other]

    found = outcome(CALLS[name], list, both)
    assert taken == [name]
    for expected in in_full(outcome, CALLS[name], list, both):
        assert all(map(same, found, expected))
