"""Shares of a threshold never add up to more."""

import math

import numpy as np
import pytest
import torch

import gradclip
from gradclip._src.core.norms import Order
from gradclip._src.step.shares import of_patterns, shares
from rational import at_most


@pytest.mark.parametrize("p", [1, 2, 3, math.inf])
def test_powers_of_shares_add_up_to_at_most_that_of_the_threshold(p):
    rng = np.random.default_rng(1)
    thresholds = [*10.0 ** rng.uniform(-30, 30, 500), 5e-324, 1e-320, 1e308]
    for threshold in map(float, thresholds):
        sizes = {str(i): int(size) for i, size in enumerate(rng.integers(0, 10**6, size=rng.integers(1, 9)) + 1)}
        found = list(shares(threshold, sizes, float(p)).values())
        assert at_most([np.array(found)], p, threshold)
        if threshold > 1e-300:
            assert not at_most([np.array(found)], p, threshold * (1 - 1e-13))


def test_shares_of_nothing():
    assert shares(1.0, {"a": 0, "b": 0}, 2.0) == {"a": 0.0, "b": 0.0}
    assert shares(math.inf, {"a": 0, "b": 1}, 2.0) == {"a": math.inf, "b": math.inf}
    assert shares(1.0, {"a": 0, "b": 0}, Order(math.inf).p) == {"a": 1.0, "b": 1.0}


def test_the_parameters_of_a_pattern_share_its_threshold():
    parameters = {name: torch.nn.Parameter(torch.zeros(size)) for name, size in (("a.v", 1), ("a.w", 3), ("b", 2))}
    parameters["frozen"] = torch.nn.Parameter(torch.zeros(5), requires_grad=False)
    parameters["a.frozen"] = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    sizes = {name: one.numel() for name, one in parameters.items() if one.requires_grad}
    found = of_patterns({"a.*": 2.0, "b": None}, parameters, Order(2.0))
    assert found(sizes) == pytest.approx({"a.v": 1.0, "a.w": math.sqrt(3.0), "b": math.inf})
    assert at_most([np.array([one for name, one in found(sizes).items() if name != "b"])], 2, 2.0)
    assert found(sizes | {"a.frozen": 4, "frozen": 5})["a.frozen"] == pytest.approx(math.sqrt(2.0))
    assert "frozen" not in found(sizes | {"frozen": 5})


@pytest.mark.parametrize(
    ("max_norm", "message"),
    [
        ({}, "maps patterns of the names of parameters to thresholds"),
        ({3: 1.0}, "maps patterns of the names of parameters to thresholds"),
        ({"*": gradclip.AdaptiveThreshold()}, r"max_norm\['\*'\] must be a real number"),
        ({"*": "1"}, r"max_norm\['\*'\] must be a real number"),
    ],
)
def test_what_is_no_dict_of_thresholds_is_refused(max_norm, message):
    with pytest.raises(TypeError, match=message):
        of_patterns(max_norm, {"v": torch.nn.Parameter(torch.zeros(2))}, Order(2.0))
