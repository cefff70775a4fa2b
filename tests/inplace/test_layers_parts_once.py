"""Which layers there are: each once, in order, and their norms where the user looks for them."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from gradclip._src.backends.registry import find
from gradclip._src.inplace.gradients import Gradients
from gradclip._src.inplace.layers import Layerwise
from gradclip._src.passed.parameters import ParameterList


def layers_of(parameters, max_norm, meeting=()):
    params = ParameterList.of(parameters)
    gradients = replace(Gradients.of(params), meeting=meeting)
    return Layerwise.of(params, max_norm, find([np.ones(1)], list), gradients)


def indices(layers):
    return list(map(list, layers.groups.groups))


def test_parameters_are_layers_of_their_own():
    first, second = np.ones(2), np.zeros(3)
    one, _, _, _ = holders = [SimpleNamespace(grad=x) for x in (first, None, second, first)]
    for given, thresholds in ((holders, [1.0, 2.0, 3.0, 4.0]), ([*holders, one], [1.0, 2.0, 3.0, 4.0, 1.0])):
        layers = layers_of(given, thresholds)
        assert indices(layers) == [[0], [1], [2]]
        assert list(layers.thresholds) == [1.0, 3.0, 4.0]
        assert layers.arranged(["a", "b", "c"]) == ["a", None, "b", "c", "a"][: len(given)]


def test_layers_of_a_tree_lie_below_a_prefix():
    array = np.ones(2)
    for tree in ({"a": [np.ones(2), np.ones(1)], "b": np.zeros(3)}, {"a": [array, array], "b": np.zeros(3)}):
        layers = layers_of(tree, {"a": 1.0, "b": 2.0})
        assert indices(layers) == ([[0, 1], [2]] if tree["a"][0] is not array else [[0], [1]])
        assert layers.arranged([5.0, 6.0]) == {"a": 5.0, "b": 6.0}


def test_arrays_of_different_layers_must_not_share_memory():
    w = np.ones(3)
    tree, thresholds = {"a": [w[:2], w], "b": np.zeros(3)}, {"a": 1.0, "b": 2.0}
    assert indices(layers_of(tree, thresholds, meeting=[[1, 0]])) == [[0, 1], [2]]
    with pytest.raises(ValueError, match=r"\['a'\]\[1\], \['b'\] share memory, so they cannot be scaled by different"):
        layers_of(tree, thresholds, meeting=[[1, 2]])
