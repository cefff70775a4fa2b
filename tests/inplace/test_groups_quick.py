"""Ordinary gradients with several thresholds take few steps, which give the same bits."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gradclip
from frameworks import WITH_FLOAT32, by_name
from rational import random_leaf, random_threshold

EAGER = [framework for framework in WITH_FLOAT32 if not (framework.jit or framework.traced)]


@pytest.mark.parametrize("framework", EAGER, ids=by_name)
@pytest.mark.parametrize("ord", [1, 2])
def test_few_steps_give_the_bits_of_careful_ones(framework, ord):
    rng = np.random.default_rng(7)
    for _ in range(30):
        dtypes = [
            str(rng.choice(["float32", "float64"] if "float64" in framework.dtypes else ["float32"])) for _ in "abcd"
        ]
        leaves = [random_leaf(rng, dtype, int(rng.integers(1, 40))) for dtype in dtypes]
        limits = [random_threshold(rng, leaves[:2], ord), random_threshold(rng, leaves[2:], ord)]
        results = []
        with framework.mode():
            for monitor in (None, gradclip.Monitor()):  # with a monitor, calls take all steps
                made = [SimpleNamespace(grad=framework.from_numpy(leaf.copy())) for leaf in leaves]
                given = [{"params": made[:2], "max_norm": limits[0]}, {"params": made[2:]}]
                norm = gradclip.clip_grad_norm_(given, limits[1], ord, monitor=monitor)
                results.append([framework.to_numpy(x) for x in (norm, *(one.grad for one in made))])
        for one, other in zip(*results, strict=True):
            np.testing.assert_array_equal(one, other)


def test_ordinary_gradients_take_few_steps(monkeypatch):
    def fail(*args):
        raise AssertionError("all steps were taken")

    monkeypatch.setattr("gradclip._src.inplace.norm.clip_by_parts", fail)
    frozen, *layers = (torch.nn.Parameter(torch.zeros(2)) for _ in range(4))
    for layer, size in zip(layers, (1.0, 2.0, 3.0), strict=True):
        layer.grad = torch.tensor([3.0, 4.0]) * size
    given = [
        {"params": [frozen, layers[0]]},
        {"params": layers[1:2], "max_norm": 20},
        {"params": layers[2:], "max_norm": None},
    ]
    version = layers[1].grad._version
    assert float(gradclip.clip_grad_norm_(given, 1.0)) == pytest.approx(math.sqrt(25 + 100 + 225))
    assert [float(layer.grad.norm()) for layer in layers] == pytest.approx([1.0, 10.0, 15.0])
    assert (layers[1].grad._version, layers[0].grad._version) == (version, 1)
    named = {"frozen": frozen, "a": layers[0], "b": layers[1], "c": layers[2]}
    assert float(gradclip.clip_grad_norm_(named, {"b": 5.0, "*": None})) == pytest.approx(math.sqrt(1 + 100 + 225))
    assert float(layers[1].grad.norm()) == pytest.approx(5.0)
    tree = {"a": np.array([3.0, 4.0]), "b": [np.array([6.0, 8.0])]}
    assert gradclip.clip_grad_norm_(tree, {"a": 1.0, "b.*": 2.0}) == pytest.approx(math.sqrt(125))
    assert tree["b"][0].round(5).tolist() == [1.2, 1.6]
