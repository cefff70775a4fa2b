"""Which layers there are: each once, in order, and their norms where the user looks for them."""

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
    params, layers = layers_of([SimpleNamespace(grad=x) for x in (first, None, second, first)], [1.0, 2.0, 3.0, 1.0])
    assert [[id(x) for x in layer] for layer in layers.layers] == [[id(first)], [id(second)]]
    assert list(layers.thresholds) == [1.0, 3.0]
    assert layers.among(Gradients.of(params)) == [[0], [1]]
    assert layers.arranged(["a", "b"]) == ["a", None, "b", "a"]


def test_layers_of_a_tree_lie_below_a_prefix():
    tree = {"a": [np.ones(2), np.ones(1)], "b": np.zeros(3)}
    params, layers = layers_of(tree, {"a": 1.0, "b": 2.0})
    assert layers.among(Gradients.of(params)) == [[0, 1], [2]]
    assert layers.arranged([5.0, 6.0]) == {"a": 5.0, "b": 6.0}


def test_gradients_that_were_left_out_are_no_layers():
    params, layers = layers_of([SimpleNamespace(grad=np.ones(2)) for _ in range(2)], 1.0)
    with pytest.raises(ValueError, match="views of the same memory"):
        layers.among(Gradients.of(params).chosen([0]))
