"""The steps to look at, in their order, and the layers responsible."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

import gradclip
from gradclip._src.monitor.page.page import events, responsible
from gradclip._src.monitor.records import Layers


def layers(**norms):
    return Layers(tuple(norms), np.array(list(norms.values()), np.float32))


def told(monitor, **settings):
    return [(event.step.step, event.what) for event in events(monitor._overview(), **settings)]


def test_those_not_finite_come_first_then_those_skipped_then_those_clipped():
    monitor = gradclip.Monitor()
    monitor.record(np.array([0.5, 2.0, math.nan, 3.0, math.inf]), 1.0)
    monitor.record(math.nan, 1.0, nonfinite="drop")
    monitor.record(np.array([90.0, 99.0, 1.0]), SimpleNamespace(max_norm=np.float32(1.0), skip_above=9.0))
    kinds = [(5, "not finite"), (3, "not finite"), (6, "not finite, skipped")]
    assert told(monitor) == [*kinds, (8, "skipped"), (7, "skipped"), (4, "clipped"), (2, "clipped")]
    assert told(monitor, most=1) == [(5, "not finite"), (6, "not finite, skipped"), (8, "skipped"), (4, "clipped")]


def test_the_order_is_that_of_norm_over_threshold():
    monitor = gradclip.Monitor()
    monitor.record(np.array([6.0, 5.0, 3.0]), np.array([3.0, 1.0, 1.0]))
    assert told(monitor) == [(2, "clipped"), (3, "clipped"), (1, "clipped")]


def test_thresholds_of_zero_and_infinity():
    monitor = gradclip.Monitor()
    monitor.record(np.array([2.0, 3.0]), 0.0)
    monitor.record(5.0, math.inf)
    assert told(monitor) == [(2, "clipped"), (1, "clipped")]
    assert told(gradclip.Monitor()) == []


def test_the_layers_of_the_step_are_named():
    monitor = gradclip.Monitor()
    monitor.record(
        np.array([5.0, 0.5, 13.0]), 1.0, layer_norms={"a": np.array([3.0, 0.3, 12.0]), "b": np.array([4.0, 0.4, 5.0])}
    )
    monitor.record(2.0, 1.0)
    assert [event.layers for event in events(monitor._overview())] == ["a (85%)", "b (64%)", ""]


@pytest.mark.parametrize(
    ("norms", "said"),
    [
        ({"a": 3.0, "b": 4.0}, "b (64%)"),
        ({"a": 3.0, "b": math.nan}, "b (NaN)"),
        ({"a": math.inf, "b": math.nan, "c": 1.0}, "a (inf), b (NaN)"),
        (dict.fromkeys("abcde", math.nan), "a (NaN), b (NaN), c (NaN) and 2 more"),
        ({"a": 0.0}, ""),
        ({}, ""),
    ],
)
def test_the_layer_responsible(norms, said):
    assert responsible(layers(**norms)) == said


def test_squares_out_of_range_are_shares():
    assert responsible(Layers(("a", "b"), np.array([3e300, 4e300]))) == "b (64%)"
    assert responsible(layers(a=3e-40, b=4e-40)) == "b (64%)"
