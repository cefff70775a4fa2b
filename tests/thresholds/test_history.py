"""How a norm of any framework enters a history."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch

from gradclip import QuantileRule, SpreadRule, SteadyRule, clip_by_global_norm
from gradclip._src.core.formats import FLOAT32, FLOAT64
from gradclip._src.thresholds.history import norms_kept, of_framework, of_one_norm


@pytest.mark.parametrize("form", [FLOAT32, FLOAT64])
@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (2.0, 2.0), (1 / 16, 1.0), (0.3, 0.3), (3 / 16, 3.0)])
def test_norms_that_are_kept_have_normal_thresholds(form, low, high):
    least, most = norms_kept(low, high, form)
    assert form.tiny <= min(least, least * low)
    assert least <= 2 * max(form.tiny, form.tiny / low)
    assert max(most, most * high) <= form.largest / 2


def test_only_a_numpy_history_of_one_norm_is_that():
    rule = QuantileRule(window=2)
    assert of_one_norm(rule.init().norms)
    assert not of_one_norm(rule.init(shape=(3,)).norms)
    assert not of_one_norm(rule.init(torch.zeros(())).norms)


@pytest.mark.parametrize("norm", [torch.tensor([1.5, 2.5]), jnp.array([1.5, 2.5]), tf.constant([1.5, 2.5]), [1.5, 2.5]])
@pytest.mark.parametrize(
    "like", [torch.zeros(()), jnp.zeros(()), np.zeros((), np.float32)], ids=["torch", "jax", "numpy"]
)
def test_norms_become_arrays_of_the_historys_framework(like, norm):
    history = QuantileRule(window=2).init(like, (2,))
    found = of_framework(history.norms, norm)
    assert type(found) is type(history.norms)
    assert np.asarray(found).tolist() == [1.5, 2.5]


def test_a_norm_beyond_the_dtype_is_infinite():
    history = QuantileRule(window=2).init(torch.zeros(()))
    assert float(of_framework(history.norms, 1e300)) == float("inf")


def test_a_dict_of_norms_has_no_order():
    history = QuantileRule(window=2).init(shape=(2,))
    with pytest.raises(TypeError, match="must be an array or a list, got a dict"):
        of_framework(history.norms, {"a": 1.0, "b": 2.0})


@pytest.mark.parametrize(
    ("rule", "compiled"),
    [(SpreadRule(window=4), tf.function), (SteadyRule(window=4), partial(tf.function, jit_compile=True))],
)
def test_variables_of_a_graph_keep_a_history_that_a_checkpoint_saves(rule, compiled, tmp_path):
    def variables():
        empty = rule.init(tf.zeros(()))
        return type(empty)(*map(tf.Variable, empty))

    def step_of(history):
        @compiled
        def step(gradient):
            threshold = rule.max_norm(history)
            _, norm = clip_by_global_norm([gradient], threshold)
            for kept, seen in zip(history, rule.observe(history, norm), strict=True):
                kept.assign(seen)
            return norm, threshold

        return step

    first, on_host = variables(), rule.init()
    step = step_of(first)
    for at, scale in enumerate((1.0, 2.0, np.nan, 0.0, 100.0, 0.3, 0.7, 4.0)):
        if at == 5:
            saved = tf.train.Checkpoint(history=list(first)).write(str(tmp_path / "history"))
            again = variables()
            tf.train.Checkpoint(history=list(again)).read(saved).assert_consumed()
            step = step_of(again)
        norm, threshold = step(tf.constant([3.0, 4.0]) * scale)
        assert float(threshold) == float(rule.max_norm(on_host))
        on_host = rule.observe(on_host, norm.numpy())
