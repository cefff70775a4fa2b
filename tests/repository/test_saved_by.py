"""Files that the first version saved load in this one."""

import json
from pathlib import Path

import pytest

import gradclip

SAVED = sorted((Path(__file__).parents[1] / "support" / "saved_by").iterdir())


@pytest.mark.parametrize("saved", SAVED, ids=lambda path: path.name)
def test_files_of_earlier_versions_load(saved):
    max_norm = gradclip.AdaptiveThreshold(gradclip.SteadyRule())
    max_norm.load_state_dict(json.loads((saved / "adaptive_threshold.json").read_text()))
    assert (max_norm.next_max_norm, max_norm.steps, max_norm.num_clipped) == (0.649519052838329, 5, 4)
    monitor = gradclip.Monitor.load(saved / "monitor.jsonl")
    assert tuple(monitor.counts) == (5, 4, 1, 1)
    assert monitor.top_layers["w"] == 12.5
    assert gradclip.PartialNorm.from_json((saved / "partial_norm.json").read_text()).norm == 5.0


def test_the_first_version_is_among_them():
    assert SAVED[0].name == "0.1"
