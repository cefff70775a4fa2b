"""Which layers there are: each once, in order, and their norms where the user looks for them."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from gradclip.backends.registry import find
from gradclip.inplace.gradients import Gradients
from gradclip.inplace.layerwise import Layerwise
from gradclip.parameters import ParameterList


def layers_of(parameters, max_norm):
    params = ParameterList.of(parameters)
    return params, Layerwise.of(params, max_norm, find([np.ones(1)], list))


def test_parameters_are_layers_of_their_own():
    first, second = np.ones(2), np.zeros(3)
    one, _, other, twin = holders = [SimpleNamespace(grad=x) for x in (first, None, second, first)]
    params, layers = layers_of([*holders, one], [1.0, 2.0, 3.0, 4.0, 1.0])
    assert [[id(x) for x in layer] for layer in layers.layers] == [[id(one)], [id(other)], [id(twin)]]
    assert list(layers.thresholds) == [1.0, 3.0, 4.0]
    assert layers.among(Gradients.of(params)) == [[0], [1], [2]]
    assert layers.arranged(["a", "b", "c"]) == ["a", None, "b", "c", "a"]


def test_layers_of_a_tree_lie_below_a_prefix():
    tree = {"a": [np.ones(2), np.ones(1)], "b": np.zeros(3)}
    params, layers = layers_of(tree, {"a": 1.0, "b": 2.0})
    assert layers.among(Gradients.of(params)) == [[0, 1], [2]]
    assert layers.arranged([5.0, 6.0]) == {"a": 5.0, "b": 6.0}


def test_arrays_of_different_layers_must_not_share_memory():
    w = np.ones(3)
    params, layers = layers_of({"a": [w[:2], w], "b": np.zeros(3)}, {"a": 1.0, "b": 2.0})
    gradients = replace(Gradients.of(params), meeting=[[1, 0]])
    assert layers.among(gradients) == [[0, 1], [2]]
    with pytest.raises(ValueError, match=r"\['a'\]\[1\], \['b'\] share memory, so they cannot be scaled by different"):
        layers.among(replace(gradients, meeting=[[1, 2]]))
