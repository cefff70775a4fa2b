"""Clipping before steps where parameter groups have thresholds of their own."""

import copy
import io
import math

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import gradclip
from gradclip import clip_at_step
from gradclip._src.step.fold import FusedClipping

RULE = gradclip.QuantileRule(factor=2.0, window=4)
FUSED = pytest.mark.parametrize("fused", [False, True])


def made(own, make=torch.optim.SGD, **settings):
    """Return two parameters, of which the second has the threshold `own`, and their optimizer."""
    body, head = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    groups = [{"params": [body]}, {"params": [head], "max_norm": own, "name": "head"}]
    return body, head, make(groups, lr=1.0, **settings)


def give(body, head, norms):
    body.grad, head.grad = (torch.tensor([0.6, 0.8]) * norm for norm in norms)


def numbers(clipping):
    return tuple(float(number) for number in clipping.numbers().values())[:3]


@FUSED
@pytest.mark.parametrize(
    ("own", "lengths", "left"),
    [
        (2.0, (1.0, 2.0), math.sqrt(5)),
        (torch.tensor(2.0), (1.0, 2.0), math.sqrt(5)),
        (None, (1.0, 50.0), math.sqrt(2501)),
        (0, (1.0, 0.0), 1.0),
        (math.inf, (1.0, 50.0), math.sqrt(2501)),
        (100, (1.0, 50.0), math.sqrt(2501)),
    ],
)
def test_each_group_keeps_to_its_threshold(own, lengths, left, fused):
    body, head, optimizer = made(own, fused=fused)
    clipping = clip_at_step(optimizer, 1.0)
    assert not isinstance(clipping, FusedClipping)  # one divisor cannot do that
    give(body, head, (5.0, 50.0))
    optimizer.step()
    assert (body.detach().norm().item(), head.detach().norm().item()) == pytest.approx(lengths)
    assert numbers(clipping) == pytest.approx((math.sqrt(25 + 2500), left, 1.0))
    assert (clipping.threshold, clipping.steps) == (1.0, 1)


def test_a_step_counts_as_clipped_if_one_group_was():
    body, head, optimizer = made(2.0)
    clipping = clip_at_step(optimizer, 1.0)
    shares = []
    for norms in ((0.5, 1.0), (0.5, 3.0), (1e-6, 1.0), (4.0, 1.0)):
        give(body, head, norms)
        optimizer.step()
        shares.append(numbers(clipping)[2])
    assert shares == [0.0, 1 / 2, pytest.approx(1 / 3), 2 / 4]


@pytest.mark.parametrize(("ord", "expected"), [(1, 3.0), (2, math.sqrt(5)), (math.inf, 2.0)])
def test_the_order_of_the_norms(ord, expected):
    body, head, optimizer = made(2.0)
    clipping = clip_at_step(optimizer, 1.0, ord=ord)
    give(body, head, (50.0, 50.0))
    optimizer.step()
    assert numbers(clipping)[1] == pytest.approx(expected)


def test_norms_whose_squares_overflow():
    body, head, optimizer = made(None)
    clipping = clip_at_step(optimizer, math.inf)
    give(body, head, (3e30, 4e30))
    optimizer.step()
    assert numbers(clipping)[:2] == pytest.approx((5e30, 5e30))


def test_only_groups_with_thresholds_of_their_own():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([{"params": [weight], "max_norm": 2.0}], lr=1.0)
    clipping = clip_at_step(optimizer, gradclip.AdaptiveThreshold(), monitor=(monitor := gradclip.Monitor()))
    for _ in range(2):
        weight.grad = torch.tensor([6.0, 8.0])
        optimizer.step()
    assert weight.tolist() == pytest.approx([-2.4, -3.2])
    assert numbers(clipping) == pytest.approx((10.0, 2.0, 1.0))
    assert (clipping.threshold, monitor.steps, monitor.num_clipped) == (None, 2, 2)


def test_a_monitor_records_each_group():
    body, head, optimizer = made(2.0)
    monitor = gradclip.Monitor()
    clip_at_step(optimizer, 1.0, monitor=monitor)
    give(body, head, (5.0, 50.0))
    optimizer.step()
    seen = [(one.last.norm, one.last.max_norm) for one in (monitor, monitor.groups["head"])]
    assert seen == [(5.0, 1.0), (50.0, 2.0)]


def test_an_adaptive_threshold_follows_its_group():
    common, own = gradclip.AdaptiveThreshold(RULE), gradclip.AdaptiveThreshold(RULE)
    body, head, optimizer = made(own)
    clipping = clip_at_step(optimizer, common)
    for norms in ((1.0, 10.0), (1.0, 10.0), (5.0, 15.0), (1.0, 50.0)):
        give(body, head, norms)
        optimizer.step()
    assert (common.steps, common.num_clipped, own.steps, own.num_clipped) == (4, 1, 4, 1)
    assert (float(common.norm), float(own.norm)) == (1.0, 50.0)
    assert numbers(clipping)[2] == 2 / 4


@pytest.mark.parametrize("where", ["common", "own"])
def test_a_spike_skips_its_own_part(where):
    follows = gradclip.AdaptiveThreshold(RULE, skip_above=4.0)
    body, head, optimizer = made(1e6 if where == "common" else follows, momentum=0.9, weight_decay=0.1)
    clipping = clip_at_step(optimizer, follows if where == "common" else 1e6)
    skips, other = (body, head) if where == "common" else (head, body)
    for _ in range(3):
        give(body, head, (1.0, 1.0))
        optimizer.step()
    before, before_other = skips.tolist(), other.tolist()
    state = copy.deepcopy(optimizer.state[skips])
    give(skips, other, (1000.0, 1.0))
    optimizer.step()
    assert (skips.tolist(), skips.grad) == (before, None)
    torch.testing.assert_close(optimizer.state[skips], state, rtol=0, atol=0)
    assert other.tolist() != before_other
    assert numbers(clipping)[1] == pytest.approx(1.0)
    assert follows.num_skipped == 1


@FUSED
@pytest.mark.parametrize("own", [2.0, None, gradclip.AdaptiveThreshold])
@pytest.mark.parametrize("common", [1.0, gradclip.AdaptiveThreshold])
@pytest.mark.parametrize("bad", ["body", "head"])
def test_nan_in_one_group_skips_the_step(own, common, bad, fused):
    own, common = (one() if isinstance(one, type) else one for one in (own, common))
    body, head, optimizer = made(own, torch.optim.AdamW, fused=fused)
    clipping = clip_at_step(optimizer, common, nonfinite="skip")
    give(body, head, (5.0, 50.0))
    optimizer.step()
    before = body.tolist(), head.tolist()
    give(body, head, (5.0, 50.0))
    (body if bad == "body" else head).grad[0] = math.nan
    optimizer.step()
    assert (body.tolist(), head.tolist()) == before
    assert [int(optimizer.state[one]["step"]) for one in (body, head)] == [1, 1]
    assert numbers(clipping)[1] == 0.0


@pytest.mark.after_error
@pytest.mark.parametrize(
    ("own", "error", "message"),
    [
        (-1.0, ValueError, r"parameters\[1\]\['max_norm'\] must not be negative"),
        ("2", TypeError, r"parameters\[1\]\['max_norm'\] must be a real number"),
    ],
)
def test_a_threshold_of_a_group_is_checked_at_once(own, error, message):
    body, head, optimizer = made(own)
    with pytest.raises(error, match=message):
        clip_at_step(optimizer, 1.0)
    give(body, head, (5.0, 50.0))
    optimizer.step()
    assert head.detach().norm().item() == pytest.approx(50.0)


def test_one_adaptive_threshold_cannot_follow_two_norms():
    follows = gradclip.AdaptiveThreshold()
    with pytest.raises(ValueError, match="are the same AdaptiveThreshold"):
        clip_at_step(made(follows)[2], follows)


@pytest.mark.parametrize("unscale", [False, True])
@FUSED
def test_a_scaler(fused, unscale):
    body, head, optimizer = made(2.0, fused=fused)
    clipping = clip_at_step(optimizer, 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((body + 10 * head) @ torch.tensor([3.0, 4.0])).backward()
    if unscale:
        scaler.unscale_(optimizer)
    elif fused:
        with pytest.raises(ValueError, match=r"Call scaler\.unscale_"):
            scaler.step(optimizer)
        return
    scaler.step(optimizer)
    assert (body.detach().norm().item(), head.detach().norm().item()) == pytest.approx((1.0, 2.0))
    assert numbers(clipping) == pytest.approx((math.sqrt(2525), math.sqrt(5), 1.0))


# Checkpoints


def as_saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_resumed_run_goes_on_to_the_last_bit():
    def run(norms, body, head, optimizer):
        for norm in norms:
            give(body, head, (norm, 10 * norm))
            optimizer.step()

    def start():
        body, head, optimizer = made(own := gradclip.AdaptiveThreshold(RULE), torch.optim.AdamW)
        clip_at_step(optimizer, gradclip.AdaptiveThreshold(RULE))
        return own, body, head, optimizer

    norms = (1.0, 1.5, 0.7, 30.0, 1.1, 4.0)
    whole, first, (own, *second) = start(), start(), start()
    run(norms, *whole[1:])
    run(norms[:3], *first[1:])
    for one, other in zip(second[:2], first[1:3], strict=True):
        one.data = other.data.clone()
    second[2].load_state_dict(as_saved(first[3].state_dict()))
    assert second[2].param_groups[1]["max_norm"] is own
    run(norms[3:], *second)
    assert [one.tolist() for one in second[:2]] == [one.tolist() for one in whole[1:3]]
    assert own.state_dict() == whole[0].state_dict()
    assert first[3].param_groups[1]["max_norm"] is first[0]  # saving takes nothing away


@pytest.mark.parametrize("saved_with", [False, True])
def test_a_checkpoint_without_thresholds_takes_none_away(saved_with):
    """PyTorch replaces all keys of a group by those of the file."""
    *_, older = made(5.0)
    if not saved_with:
        del older.param_groups[1]["max_norm"]
    _body, _head, optimizer = made(2.0)
    clip_at_step(optimizer, 1.0)
    optimizer.load_state_dict(as_saved(older.state_dict()))
    assert optimizer.param_groups[1]["max_norm"] == (5.0 if saved_with else 2.0)
    assert "max_norm" not in optimizer.param_groups[0]


OWN = {"adaptive": lambda: gradclip.AdaptiveThreshold(RULE), "fixed": lambda: 2.0, "none": lambda: None}


@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
@pytest.mark.parametrize("saved_own", OWN.values(), ids=OWN)
def test_a_file_says_no_more_of_an_adaptive_threshold_than_that_there_was_one(own, saved_own):
    *_, saved = made(saved_own())
    *_, optimizer = made(given := own())
    for one in (saved, optimizer):
        if one.param_groups[1]["max_norm"] is None:
            del one.param_groups[1]["max_norm"]
        clip_at_step(one, 1.0)
    optimizer.load_state_dict(as_saved(saved.state_dict()))
    expected = 2.0 if saved_own is OWN["fixed"] and own is not OWN["adaptive"] else given
    assert optimizer.param_groups[1].get("max_norm") is expected or expected == 2.0


@pytest.mark.parametrize("through_files", [False, True])
@pytest.mark.parametrize("setting", ["cpu_offload", "full_state_dict", "flatten_optimizer_state_dict"])
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_an_adaptive_threshold_of_a_group_goes_through_torch_distributed_checkpoint(setting, through_files, tmp_path):
    options, runs = StateDictOptions(**{setting: True}), []
    for _ in range(2):
        body, head, optimizer = made(own := gradclip.AdaptiveThreshold(RULE), torch.optim.AdamW)
        runs.append((torch.nn.ParameterDict({"body": body, "head": head}), optimizer, own))
        clip_at_step(optimizer, 1.0)
    (model, optimizer, _), (other_model, other, own) = runs
    for norm in (1.0, 30.0):
        give(model["body"], model["head"], (norm, norm))
        optimizer.step()
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    if through_files:
        dcp.save(saved, checkpoint_id=tmp_path)
        saved = get_optimizer_state_dict(other_model, other, options=options)
        dcp.load(saved, checkpoint_id=tmp_path)
    set_optimizer_state_dict(other_model, other, saved, options=options)
    assert other.param_groups[1]["max_norm"] is own
    assert other.state[other_model["body"]]["step"] == 2


@pytest.mark.after_error
def test_a_state_that_cannot_be_loaded_changes_nothing():
    body, head, optimizer = made(own := gradclip.AdaptiveThreshold(RULE))
    clip_at_step(optimizer, common := gradclip.AdaptiveThreshold(RULE))
    give(body, head, (1.0, 10.0))
    optimizer.step()
    state, before = optimizer.state_dict(), (own.state_dict(), common.state_dict())
    state["gradclip"] = {"max_norm": gradclip.AdaptiveThreshold().state_dict(), "groups": [None, {"norms": []}]}
    with pytest.raises(ValueError, match="an AdaptiveThreshold's state has"):
        optimizer.load_state_dict(state)
    assert (own.state_dict(), common.state_dict()) == before
    assert optimizer.param_groups[1]["max_norm"] is own
