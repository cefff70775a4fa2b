"""Thresholds that hold no value, or several where one belongs."""

import math
from functools import partial
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import gradclip
from gradclip.integrations import optax as optax_like

TREE = {"w": np.array([3.0, 4.0]), "b": np.array([12.0])}


def test_tensors_without_values_have_no_partial_norm_and_are_no_thresholds():
    with pytest.raises(ValueError, match="on the meta device holds no values"):
        gradclip.partial_norm(torch.ones(2, device="meta"))
    for call in (
        gradclip.clip_by_global_norm,
        gradclip.clip_by_layer_norm,
        gradclip.clip_by_value,
        gradclip.norm_at_most,
    ):
        with pytest.raises(ValueError, match="is a tensor on the meta device, which holds no value"):
            call(TREE, torch.tensor(1.0, device="meta"))


@pytest.mark.parametrize("bad", [-1.0, math.nan])
def test_negative_and_nan_thresholds_are_refused_for_zeros_too(framework, bad):
    zeros = framework.array([0.0, 0.0])
    for call in (gradclip.clip_by_global_norm, gradclip.clip_by_layer_norm, gradclip.clip_by_value):
        with pytest.raises(ValueError, match=r"(max_norm|clip_value) must not be negative or NaN"):
            call([zeros], bad)
    with pytest.raises(ValueError, match="max_norm must not be negative or NaN"):
        gradclip.clip_grad_norm_([SimpleNamespace(grad=zeros)], bad)


def test_one_threshold_says_where_several_go():
    with pytest.raises(TypeError, match=r"For one threshold per layer, call gradclip.clip_by_layer_norm"):
        gradclip.clip_by_global_norm(TREE, {"w": 1.0, "b": 1.0})


@pytest.mark.parametrize(
    ("threshold", "advice"),
    [
        (None, r"of type NoneType\. To switch clipping off pass max_norm=math\.inf\."),
        ("1.0", r"of type str\. For example, pass max_norm=1\.0\."),
        (np.array([1.0]), r"of type ndarray\. Pass the number in it, max_norm\[0\]\."),
        (
            gradclip.AdaptiveThreshold,
            r"This is a class\. Make an object of it, before the loop: AdaptiveThreshold\(\)\.",
        ),
    ],
)
def test_what_is_no_threshold_leads_to_one(threshold, advice):
    for call in (gradclip.clip_by_global_norm, gradclip.clip_grad_norm_):
        with pytest.raises(TypeError, match=f"^max_norm must be a real number .*{advice}$"):
            call({"w": np.ones(2)}, threshold)


@pytest.mark.parametrize("make", [np.array, jnp.array, torch.tensor])
def test_thresholds_of_layers_in_an_array_come_as_a_list(make):
    tree = [make([3.0, 4.0]), make([5.0])]
    with pytest.raises(TypeError, match=r"with list\(max_norm\)"):
        gradclip.clip_by_layer_norm(tree, make([1.0, 2.0]))
    _, norms = gradclip.clip_by_layer_norm(tree, list(make([1.0, 2.0])))
    assert list(map(float, norms)) == [5.0, 5.0]


@pytest.mark.parametrize("schedule", [optax.cosine_decay_schedule(1.0, 10), lambda step: 1.0, partial(max, 1.0)])
def test_a_schedule_as_threshold_is_told_how_to_be_used(schedule):
    transformed = partial(optax_like.clip, schedule)
    for call, name in ((lambda: gradclip.clip_by_global_norm(TREE, schedule), "max_norm"), (transformed, "max_delta")):
        with pytest.raises(TypeError, match=rf"every step: {name}=schedule\(step\)\. .*optax\.inject_hyperparams\("):
            call()
