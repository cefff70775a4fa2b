"""Many layers go to the kernels at once: few calls, little time, and memory of their own."""

import math
import time

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip
from part_by_part import at_once


def make(kind, count):
    rows = np.random.default_rng(0).normal(size=(count, 5)).astype(np.float32)
    return [{"numpy": np.array, "torch": torch.tensor, "jax": jnp.array}[kind](row) for row in rows]


@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("thresholds", ["one", "each"])
def test_no_layer_is_clipped_or_measured_alone(kind, thresholds):
    tree = make(kind, 300)
    with at_once():
        _, norms = gradclip.clip_by_layer_norm(tree, 1.0 if thresholds == "one" else [1.0] * 300)
        again = gradclip.layer_norms(tree)
    assert list(map(float, norms)) == list(map(float, again))


def test_each_norm_of_pytorch_changes_alone():
    """They are entries of one vector, because a tensor for each takes three times as long as all the rest."""
    _, norms = gradclip.clip_by_layer_norm(make("torch", 5), 1.0)
    before = list(map(float, norms))
    norms[2].zero_()
    assert list(map(float, norms)) == [*before[:2], 0.0, *before[3:]]


def test_results_share_no_memory_with_the_input():
    for kind in ("numpy", "torch"):
        tree = make(kind, 5)
        clipped, _ = gradclip.clip_by_layer_norm(tree, 1e9)
        for x, y in zip(tree, clipped, strict=True):
            y += 1
            assert (np.asarray(x) != np.asarray(y)).all()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_many_leaves_take_time_in_proportion(kind):
    """Some 20 microseconds each; one by one 200 for each layer, and 60 for each leaf."""
    tree = make(kind, 4000)
    for function in (gradclip.clip_by_layer_norm, gradclip.clip_by_global_norm):
        best = math.inf
        for _ in range(5):
            start = time.thread_time()
            function(tree, 1.0)
            best = min(best, time.thread_time() - start)
        assert best < 4000 * 100e-6
