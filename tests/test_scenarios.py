"""What docs/adaptive.md claims of the rule and of others, tried again on one seed, and as it was measured."""

import importlib
import json
import math
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
KEPT = json.loads((BENCHMARKS / "results" / "scenarios.json").read_text())
CALM = ("stationary", "decay", "bfloat16", "constant", "spikes, 0.1%", "spikes, 1%", "bursts of 20")
KILLED = {
    "AutoClip": ("level x3", "level x30", "one NaN", "2,000 zeros"),
    "ZClip": ("level x30", "one NaN", "2,000 zeros"),
    "AdaGC": ("level x30", "one NaN", "2,000 zeros"),
    "Open-Sora Plan": ("level x30", "one NaN", "2,000 zeros"),
    "Fira": ("one NaN", "one infinity", "2,000 zeros"),
    "smartclip": ("level /30", "spikes, 1%", "bursts of 20"),
}
"""What the page says of each published rule: after these histories no step was sound again."""


@pytest.fixture
def scenarios(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("scenarios")


def check_ours(found):
    assert len(found) == 17
    assert max(found[name]["clipped"] for name in CALM) < 0.0005
    through = {name: one["through"] for name, one in found.items() if one["through"]}
    assert set(through) == {"spike at once"}  # what `initial=` is for
    assert max(one["recovery"] for one in found.values()) <= 65
    assert [found[name]["recovery"] for name in ("one NaN", "50 NaN", "one infinity", "2,000 zeros")] == [0] * 4
    assert not any(one["dead"] or one["passes NaN"] for one in found.values())


def test_ours_is_never_killed(scenarios):
    ours = next(make for make in scenarios.RULES if make.name == "QuantileRule")
    check_ours(scenarios.measured([ours], seeds=1)["QuantileRule"])
    check_ours(KEPT["scenarios"]["QuantileRule"])


def test_published_rules_are_killed_as_the_page_says(scenarios):
    for make in scenarios.RULES:
        histories = {name: scenarios.HISTORIES[name] for name in KILLED.get(make.name, ())}
        found = scenarios.measured([make], histories, seeds=1)[make.name]
        kept = KEPT["scenarios"][make.name]
        assert [name for name in histories if not (found[name]["dead"] and kept[name]["dead"])] == []


def test_those_with_a_window_recover(scenarios):
    for name in ("SkipStep", "icefall", "bitsandbytes", "TRELLIS"):
        assert not any(one["dead"] for one in KEPT["scenarios"][name].values())


def test_the_page_shows_where_others_are_better():
    """A rise is followed sooner where the newest norm counts at once."""
    kept = KEPT["scenarios"]
    assert kept["bitsandbytes"]["level x30"]["recovery"] < kept["QuantileRule"]["level x30"]["recovery"]
    for name in ("smartclip", "SkipStep"):
        assert kept[name]["heavy tail"]["clipped"] < kept["QuantileRule"]["heavy tail"]["clipped"]
    for name in ("fixed, chosen well", "AdaGC", "Open-Sora Plan"):
        assert kept[name]["spike at once"]["through"] == 0


def test_icefall_is_on_guard_after_ten_steps(scenarios):
    rule = next(make for make in scenarios.RULES if make.name == "icefall")()
    limits = {}
    for step in range(201):
        rule.after(1.0 if step <= 40 else 3.0)
        limits[step] = rule.limit
    assert [limits[step] for step in (9, 10, 40, 99, 100, 200)] == [math.inf, 4.0, 4.0, 4.0, 6.0, 6.0]
    assert rule.after(math.inf) == 0.0
    assert math.isnan(rule.after(math.nan))
    assert KEPT["scenarios"]["icefall"]["spike at step 10"]["through"] == 0
    assert min(next(row for row in KEPT["training"] if row["rule"] == "icefall")["bad batches"]) > 0.95


def test_a_training_with_bad_batches(scenarios):
    import bad_batches

    ours, none = (
        make for make in (*scenarios.RULES, bad_batches.NoClipping) if make.name in ("QuantileRule", "no clipping")
    )
    for found in (bad_batches.accuracies([ours], seeds=1), [KEPT["training"][0]]):
        assert found[0]["rule"] == "QuantileRule"
        assert min(found[0]["bad batches"] + found[0]["and a NaN"]) > 0.95
    assert KEPT["training"][-1]["rule"] == none.name
    assert max(KEPT["training"][-1]["bad batches"]) < 0.2
