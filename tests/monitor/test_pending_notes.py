"""The loss of a step, and what the caller hands as its context."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch

import gradclip
from gradclip._src.monitor.pending import Note, Pending
from gradclip._src.monitor.pending import resolved as seen


def pending(norm):
    return Pending.of(norm, 1.0, {"a": norm}, "propagate", None)


def said(norm, note):
    return pending(norm).noted(note, sampled=True)


def resolved(pending, first):
    return (one.step for one in seen(pending, first))


@pytest.mark.parametrize(
    "make", [np.float32, jnp.float32, torch.tensor, tf.constant, float], ids=["numpy", "jax", "torch", "tf", "float"]
)
def test_a_loss_of_every_framework(make):
    (step,) = resolved([said(5.0, Note.of(make(0.25), None))], 1)
    assert (step.norm, step.loss, type(step.loss)) == (5.0, 0.25, float)
    assert step.layers.norms.tolist() == [5.0]


def test_a_loss_for_each_of_several_steps_as_scan_returns_them():
    _, (norms, losses) = jax.lax.scan(lambda c, x: (c, (x, 2 * x)), 0.0, jnp.array([1.0, 2.0, 3.0]))
    found = [*resolved([said(norms, Note.of(losses, [7, 8, 9])), pending(4.0)], 1)]
    assert [step.loss for step in found[:3]] == [2.0, 4.0, 6.0]
    assert found[3].loss is math.nan


def test_a_loss_with_a_graph_is_kept_without_it():
    loss = (torch.ones(2, requires_grad=True) ** 2).sum()
    note = Note.of(loss, None)
    assert not note.loss.requires_grad
    with torch.no_grad():
        loss *= 0.0
    (step,) = resolved([said(5.0, note)], 1)
    assert step.loss == 2.0


@pytest.mark.parametrize("loss", ["0.5", [0.5], 1j, np.array(["a"]), {"a": 0.5}])
def test_what_is_no_loss(loss):
    with pytest.raises(TypeError, match="loss must be a number or an array"):
        gradclip.Monitor().note(loss=loss)
    with pytest.raises(TypeError, match="loss must be a number or an array"):
        gradclip.Monitor().record(5.0, 1.0, loss=loss)


def test_a_note_is_of_one_step():
    with pytest.raises(TypeError, match=r"loss must be a scalar, that of the next step, got shape \(2,\)"):
        gradclip.Monitor().note(loss=np.ones(2))


def test_a_loss_of_other_steps():
    for norm, loss in ((5.0, np.ones(1)), (np.ones(3), np.ones(2)), (np.ones(3), 1.0)):
        with pytest.raises(ValueError, match="loss must have the shape of norm"):
            said(norm, Note.of(loss, None))


def test_the_context_of_one_step_is_anything():
    for context in ((), [1, 2], {"epoch": 3}, "batch 7", np.arange(4)):
        assert said(5.0, Note.of(None, context)).note.context is context


@pytest.mark.parametrize("context", ["abc", [1, 2], 7, {1: 2, 3: 4, 5: 6}, np.array(3), torch.tensor(3)])
def test_the_context_of_several_steps_has_an_entry_for_each(context):
    with pytest.raises(ValueError, match="context must be a list or an array with one entry for each of 3 steps, got"):
        said(np.ones(3), Note.of(None, context))


def test_a_traced_loss_is_refused_with_the_way_out():
    with pytest.raises(TypeError, match=r"loss is traced: .* record it outside"):
        jax.jit(lambda loss: gradclip.Monitor().note(loss=loss))(1.0)


def test_the_caller_says_the_number_of_a_step():
    monitor = gradclip.Monitor()
    for told in (1001, None, 1001, 1005):
        monitor.note(step=told)
        monitor.record(1.0, 1.0)
    monitor.note(step=1007)
    monitor.record(np.ones(2), 1.0)
    assert [step.step for step in monitor.records] == [1001, 1002, 1003, 1005, 1007, 1008]
    again = gradclip.Monitor()
    again.load_state_dict(monitor.state_dict())
    assert (again.steps, again.last) == (6, monitor.last)
    for step in (0, 1.5, True, "3"):
        with pytest.raises(ValueError, match="step must be a whole number of at least 1"):
            monitor.note(step=step)


def test_numbers_of_steps_where_one_cannot_be_fetched():
    monitor = gradclip.Monitor()
    lost = jnp.ones(())
    for told, norm in ((5, 1.0), (7, lost), (9, 2.0), (None, 3.0)):
        monitor.note(step=told)
        monitor.record(norm, 1.0)
    monitor._history._pending[1].norm.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        monitor.fetch()
    assert [(step.step, step.norm) for step in monitor.records] == [(5, 1.0), (9, 2.0), (10, 3.0)]


def test_groups_are_told_what_is_said_of_a_step():
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "max_norm": 1.0, "name": name} for name in "ab"]
    monitor = gradclip.Monitor()
    for step in (11, 12, 13):
        for group in groups:
            group["params"][0].grad = torch.ones(2)
        monitor.note(loss=step / 2, step=step)
        gradclip.clip_grad_norm_(groups, 1.0, monitor=monitor)
    for one in (monitor, *monitor.groups.values()):
        assert [(step.step, step.loss) for step in one.records] == [(11, 5.5), (12, 6.0), (13, 6.5)]
