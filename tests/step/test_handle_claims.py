"""An AdaptiveThreshold or a Monitor for two optimizers is refused, and nothing has been changed."""

import copy
from functools import partial

import pytest
import torch

import gradclip
from gradclip import clip_at_step
from gradclip._src.step.engine import EngineClipping
from gradclip._src.thresholds.holder import AdaptiveThreshold

ATTACH = {"clip_at_step": clip_at_step, "folded": partial(clip_at_step, fused=True)}


def adam(**settings):
    return torch.optim.Adam([{"params": [torch.nn.Parameter(torch.zeros(2))], **settings}], fused=True)


@pytest.mark.parametrize("first", ATTACH)
@pytest.mark.parametrize("second", ATTACH)
@pytest.mark.parametrize("shared", ["max_norm", "monitor"])
def test_two_optimizers(first, second, shared):
    norm, monitor = AdaptiveThreshold(), gradclip.Monitor()
    given = {"max_norm": norm, "monitor": None} if shared == "max_norm" else {"max_norm": 1.0, "monitor": monitor}
    handle, other = ATTACH[first](adam(), **given), adam()
    kind = "AdaptiveThreshold" if shared == "max_norm" else "Monitor"
    for _ in range(2):
        with pytest.raises(ValueError, match=f"this {kind} already follows another optimizer. Pass each"):
            ATTACH[second](other, **given)
    assert not other._optimizer_step_pre_hooks
    apart = ATTACH[second](other, **{name: copy.deepcopy(value) for name, value in given.items()})
    apart.remove()
    handle.remove()
    ATTACH[second](other, **given)


def test_a_group_of_another_optimizer_and_an_assignment():
    norm = AdaptiveThreshold()
    grouped, plain = adam(max_norm=norm), adam()
    handle = clip_at_step(grouped, 1.0)
    with pytest.raises(ValueError, match="already follows another optimizer"):
        clip_at_step(plain, norm)
    clipping = clip_at_step(plain, 2.0)
    with pytest.raises(ValueError, match="already follows another optimizer"):
        clipping.max_norm = norm
    assert clipping.max_norm == 2.0
    handle.remove()
    clipping.max_norm = norm
    clipping.max_norm = norm
    with pytest.raises(ValueError, match="already follows another optimizer"):
        clip_at_step(grouped, 1.0)


@pytest.mark.parametrize("added", [False, True])
def test_a_threshold_that_a_group_gets_later_is_claimed_at_the_step(added):
    norm, optimizers = AdaptiveThreshold(), [adam(), adam()]
    handles = [clip_at_step(one, 1.0, nonfinite="zero") for one in optimizers]
    for one in optimizers:
        if added:
            one.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], "max_norm": norm})
        one.param_groups[-1]["max_norm"] = norm
        for group in one.param_groups:
            group["params"][0].grad = torch.tensor([3.0, 4.0])
    optimizers[0].step()
    for _ in range(2):
        with pytest.raises(ValueError, match="this AdaptiveThreshold already follows another optimizer"):
            optimizers[1].step()
    with pytest.raises(ValueError, match="already follows another optimizer"):
        clip_at_step(adam(), norm)
    weight = optimizers[1].param_groups[-1]["params"][0]
    assert (norm.steps, weight.tolist(), weight.grad.tolist()) == (1, [0.0, 0.0], [3.0, 4.0])
    handles[0].remove()
    optimizers[1].step()
    assert norm.steps == 2


@pytest.mark.parametrize("attach", ATTACH.values())
def test_a_threshold_that_a_group_gets_after_folding_is_refused(attach):
    optimizer = adam()
    handle = attach(optimizer, 1.0)
    (weight,) = optimizer.param_groups[0]["params"]
    weight.grad = torch.tensor([3.0, 4.0])
    optimizer.param_groups[0]["max_norm"] = 0.5
    with pytest.raises(ValueError, match=r"has got 'max_norm', .* Call remove\(\) .* then clip_at_step again"):
        optimizer.step()
    assert weight.tolist() == [0.0, 0.0]
    handle.remove()
    handle = clip_at_step(optimizer, 1.0)
    optimizer.step()
    assert (handle.norm.item(), weight.grad.norm().item()) == (5.0, pytest.approx(0.5))


def test_an_engine_and_an_optimizer():
    norm, monitor = AdaptiveThreshold(), gradclip.Monitor()
    engine = EngineClipping(object(), "DeepSpeed", norm, monitor)._undone_by(lambda: None)
    for given in ({"max_norm": norm}, {"max_norm": 1.0, "monitor": monitor}):
        with pytest.raises(ValueError, match="already follows another optimizer"):
            clip_at_step(adam(), **given)
    engine.remove()
    kept = adam()
    clip_at_step(kept, norm, monitor=monitor)
    with pytest.raises(ValueError, match="already follows another optimizer"):
        EngineClipping(object(), "DeepSpeed", norm, None)
    with pytest.raises(ValueError, match="already follows another optimizer"):
        EngineClipping(object(), "DeepSpeed", 1.0, monitor)


@pytest.mark.parametrize("attach", ATTACH.values())
def test_an_optimizer_that_is_gone_keeps_nothing(attach):
    norm = AdaptiveThreshold()
    handle = attach(adam(), norm)
    del handle
    attach(adam(), norm)


@pytest.mark.parametrize("attach", ATTACH.values())
def test_a_handle_removed_twice_lets_no_second_clipping_in(attach):
    optimizer = adam()
    old = attach(optimizer, 1.0)
    old.remove()
    attach(optimizer, 2.0)
    old.remove()
    with pytest.raises(ValueError, match="clip already"):
        attach(optimizer, 3.0)


@pytest.mark.parametrize("attach", ATTACH.values())
def test_an_optimizer_made_anew_for_the_same_parameters_takes_over(attach):
    """As in a cell of a notebook that is run again, where a name still refers to the old handle."""
    norm, monitor, weight = AdaptiveThreshold(), gradclip.Monitor(), torch.nn.Parameter(torch.zeros(2))
    for _ in range(2):
        optimizer = torch.optim.Adam([weight], fused=True)
        handle = attach(optimizer, norm, monitor=monitor)
        weight.grad = torch.tensor([3.0, 4.0])
        optimizer.step()
    assert (handle.steps, norm.steps, monitor.steps) == (1, 2, 2)


@pytest.mark.parametrize("attach", ATTACH.values())
def test_one_that_was_replaced_is_free(attach):
    norm, one, other = AdaptiveThreshold(), adam(), adam()
    first = attach(one, norm)
    first.max_norm = 1.0
    second = attach(other, norm)
    with pytest.raises(ValueError, match="already follows another optimizer"):
        first.max_norm = norm
    assert (first.max_norm, second.max_norm) == (1.0, norm)
