"""Padding repeats a real example: a loss may fail on examples that are not real."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch

import gradclip

MAKERS = {"jax": jnp.asarray, "torch": torch.as_tensor, "tensorflow": tf.constant}
ROWS = np.float32([[3.0, 4.0], [0.5, 0.0], [1.0, 2.0]])
SETTINGS = [{"pad_to": 5}, {"microbatch_size": 2}, {"microbatch_size": 8}, {"pad_to": 9, "microbatch_size": 4}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("method", ["materialize", "loop"])
def test_a_loss_sees_real_examples_only(settings, method):
    seen = []

    def loss(w, x):
        seen.append(x.tolist()) if method == "loop" else seen
        return torch.linalg.cholesky(x[0][:, None] * x[0] + torch.eye(2) * (x.sum() > 0)).sum() * w.sum()

    summed = gradclip.clipped_grad(loss, 1.0, method=method, **settings)(torch.ones(2), torch.as_tensor(ROWS))
    assert summed.isfinite().all()
    assert all(row in [[x] for x in ROWS.tolist()] for row in seen)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_callback_sees_real_examples_only(settings, compiled):
    seen = []

    def loss(w, x):
        jax.debug.callback(lambda row: seen.append(row.tolist()), x[0])
        return (w * x).sum()

    clipped = gradclip.clipped_grad(loss, 100.0, **settings)
    found = (jax.jit(clipped) if compiled else clipped)(jnp.ones(2), jnp.asarray(ROWS))
    jax.effects_barrier()
    assert found.tolist() == ROWS.sum(0).tolist()
    assert seen
    assert all(row in ROWS.tolist() for row in seen)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_checks_of_tensorflow_pass(settings):
    def loss(w, x):
        with tf.control_dependencies([tf.debugging.assert_positive(tf.reduce_sum(x))]):
            return tf.reduce_sum(w * x)

    clipped = gradclip.clipped_grad(loss, 100.0, method="loop", **settings)
    assert clipped(tf.ones(2), tf.constant(ROWS)).numpy().tolist() == ROWS.sum(0).tolist()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_inner_dimensions_that_are_known_when_a_graph_runs(settings):
    def loss(w, x):
        return tf.reduce_sum(w) * tf.reduce_sum(x), x

    clipped = gradclip.clipped_grad(loss, 100.0, has_aux=True, return_norms=True, **settings)
    recorded = tf.function(clipped, input_signature=[tf.TensorSpec([2]), tf.TensorSpec([3, None, 2])])
    for inner in (1, 4):
        summed, outputs = recorded(tf.ones(2), tf.tile(tf.constant(ROWS)[:, None], [1, inner, 1]))
        assert summed.numpy().tolist() == [inner * ROWS.sum()] * 2
        assert outputs.aux.shape == (3, inner, 2)


@pytest.mark.parametrize("name", MAKERS)
def test_an_empty_batch_has_nothing_to_repeat(name):
    make = MAKERS[name]
    for settings in SETTINGS:
        clipped = gradclip.clipped_grad(lambda w, x: (w * x)[0, 0] + (w * x)[0, 1], 1.0, **settings)
        assert np.asarray(clipped(make(np.ones(2, "f")), make(ROWS[:0]))).tolist() == [0.0, 0.0]


def test_examples_that_do_not_count_hide_none_after_them_in_later_microbatches():
    x, mask = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0]]), torch.tensor([False, True, False, False, True])
    for size in (1, 2, 3):
        summed = gradclip.clipped_grad(lambda p, x: (p * x).sum(), 100.0, microbatch_size=size)
        assert summed(torch.zeros(1), x, mask=mask).tolist() == [18.0]
