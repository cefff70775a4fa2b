"""Muon beside AdamW: what Muon updates is only measured, so that a spike elsewhere does not starve it."""

import pytest
import torch

import gradclip

SPIKE = 1e10


def trained(groups_of, spike=SPIKE):
    """Make one step of both optimizers; return Muon's update, and the norm of AdamW's gradient."""
    torch.manual_seed(0)
    hidden, head = torch.nn.Parameter(torch.zeros(16, 16)), torch.nn.Parameter(torch.zeros(1))
    muon = torch.optim.Muon([hidden], lr=1.0, weight_decay=0.0)
    adamw = torch.optim.AdamW([head], lr=0.1)
    hidden.grad, head.grad = torch.randn(16, 16), torch.tensor([spike])
    norm = gradclip.clip_grad_norm_(groups_of(muon, adamw), 1.0)
    assert float(norm) == pytest.approx(max(spike, 16.0), rel=0.1)
    for optimizer in (muon, adamw):
        optimizer.step()
    return hidden.detach(), float(head.grad)


def together(muon, adamw):
    return [*muon.param_groups, *adamw.param_groups]


def muon_measured(muon, adamw):
    for group in muon.param_groups:
        group["max_norm"] = None
    return together(muon, adamw)


def both_with_thresholds(muon, adamw):
    return [{"params": muon.param_groups[0]["params"], "max_norm": None}, {**adamw.param_groups[0], "max_norm": 0.5}]


def test_one_coefficient_for_all_starves_muon():
    usual, _ = trained(together, spike=0.0)
    starved, head = trained(together)
    assert float(usual.norm()) == pytest.approx(3.87, rel=0.05)
    assert float(starved.norm()) == pytest.approx(0.70, rel=0.05)
    assert 0.99 < head <= 1.0


@pytest.mark.parametrize(("groups_of", "limit"), [(muon_measured, 1.0), (both_with_thresholds, 0.5)])
def test_what_is_only_measured_gets_the_update_of_an_unclipped_gradient(groups_of, limit):
    torch.manual_seed(0)
    alone = torch.nn.Parameter(torch.zeros(16, 16))
    alone.grad = torch.randn(16, 16)
    torch.optim.Muon([alone], lr=1.0, weight_decay=0.0).step()
    update, head = trained(groups_of)
    assert torch.equal(update, alone.detach())
    assert 0.99 * limit < head <= limit
