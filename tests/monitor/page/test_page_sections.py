"""Tables and text of the page: which steps to look at, the proposal, layers and percentiles."""

import re
from html import escape

import numpy as np

import gradclip
from gradclip._src.monitor.advice import Advice
from gradclip._src.monitor.page.page import advised, happened, largest_layers, of_percentiles, spiked
from gradclip._src.monitor.records import Columns, Step


def cells(html):
    rows = re.findall(r"<tr>(.*?)</tr>", html)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]


def test_steps_to_look_at_are_listed_with_their_total():
    monitor = gradclip.Monitor()
    norms = np.array([446.0, *np.arange(2.0, 14.0)])
    monitor.record(norms, 1.0, layer_norms={"a": norms * 0.6, "b": norms * 0.8})
    (text,) = happened(monitor._overview())
    assert "Steps in all: 13 clipped. The table shows 8 of them" in text
    head, first, second, *_ = rows = cells(text)
    assert head == ["step", "norm", "norm / threshold", "what", "layer, share"]
    assert (first, second) == (["1", "446", "446 x", "clipped", "b (64%)"], ["13", "13", "13 x", "clipped", "b (64%)"])
    assert len(rows) == 9


def test_steps_without_layers():
    monitor = gradclip.Monitor()
    monitor.record(2.0, 1.0)
    (text,) = happened(monitor._overview())
    assert "use Monitor(layers_every=1)" in text
    assert cells(text)[1] == ["1", "2", "2 x", "clipped"]
    monitor.record(3.0, 1.0, layer_norms={"a": 3.0})
    (text,) = happened(monitor._overview())
    assert [row[-1] for row in cells(text)[1:]] == ["a (100%)", "not recorded"]


def test_nothing_to_look_at():
    monitor = gradclip.Monitor()
    monitor.record(0.5, 1.0)
    assert list(happened(monitor._overview())) == []
    assert list(largest_layers(monitor._overview())) == []


def test_percentiles_are_factors_of_the_threshold():
    rows = cells(of_percentiles(Columns.of([Step(1, 446.0, 1.0)])))
    assert rows[1] == ["smallest", "446", "446 x"]
    assert len(rows) == 10
    assert cells(of_percentiles(Columns.of([Step(1, 5.0, 0.0)])))[1] == ["smallest", "5", ""]
    assert of_percentiles(Columns.of([])) == "<p>No norm was finite.</p>"


def test_spikes_are_told_with_their_layers_and_context():
    monitor = gradclip.Monitor()
    norms = np.array([1.0] * 20 + [446.0])
    layers = {"a<b": norms * 0.6, "c": norms * 0.8}
    monitor.record(norms, 1.0, layer_norms=layers, context=[f"<batch {i}>" for i in range(21)], loss=norms)
    (text,) = spiked(monitor._overview())
    assert escape(str(monitor.spikes[0])) in text
    assert "&lt;batch 20&gt;" in text
    assert "<batch" not in text
    assert list(spiked(gradclip.Monitor()._overview())) == []


def test_the_layers_of_a_spike_are_named_although_none_were_recorded():
    monitor = gradclip.Monitor()
    for norm in [0.1] * 20 + [446.0]:
        gradclip.clip_grad_norm_({"a": np.array([norm]), "b": np.array([0.01])}, 1.0, monitor=monitor)
    assert monitor.layers is None
    (text,) = happened(monitor._overview())
    assert cells(text)[1] == ["21", "446", "446 x", "clipped", "a (100%)"]


def test_the_state_of_the_advice_is_told():
    shown = gradclip.Monitor()._overview()
    spikes = Advice(2.0, ("<why>",), state="spikes", proposal="Use 2.", try_values=(2.0, 4.0))
    assert advised(spikes, shown) == (
        "<p class='proposal'>Use 2.</p><p>To compare, train with max_norm = <code>2</code>, then <code>4</code>.</p>"
        "<ul><li>&lt;why&gt;</li></ul>"
    )
    level = Advice(2.0, (), state="level", proposal="Try 2, then 4.", try_values=(2.0, 4.0))
    assert advised(level, shown) == "<p class='proposal'>Try 2, then 4.</p><ul></ul>"
