import json

import pytest

import training_logs
from gradclip._src.logs.json_files import of_document, of_lines
from gradclip._src.logs.rows import LogError


def test_a_state_that_is_cut_off_keeps_its_whole_entries(tmp_path):
    path = tmp_path / "trainer_state.json"
    text = training_logs.trainer_state()
    for end in range(len(text) // 3, len(text), 997):
        path.write_text(text[:end])
        log = of_document(path, None)
        whole = json.loads(text)["log_history"]
        assert [row.norm for row in log.rows] == [entry["grad_norm"] for entry in whole[: len(log.rows)]]
        assert len(log.rows) == sum(text.find(f'"step": {entry["step"]}\n    }}') + 20 < end for entry in whole[:40])
        assert "cut off" in log.notes[0]


def test_steps_in_other_shapes(tmp_path):
    path = tmp_path / "a.json"
    for found in (
        {"grad_norm": 1.5},
        {"metrics": {"grad_norm": 1.5}},
        [{"grad_norm": 1.5}, 3, None],
        {"grad_norm": [1.5], "name": "x"},
        {"history": [{"grad_norm": 1.5}], "log_history": [{"grad_norm": 1.5}]},
    ):
        path.write_text(json.dumps(found))
        assert [row.norm for row in of_document(path, None).rows] == [1.5], found


def test_names_are_told_in_one_short_line(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{f"name {place}\n" * 20: 1 for place in range(100)}]))
    with pytest.raises(LogError, match="and 90 more") as raised:
        of_document(path, None)
    assert len(str(raised.value).splitlines()) == 1


def test_lines_of_a_monitor_keep_threshold_and_skips(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1, "norm": 2.0, "max_norm": 0.5, "skipped": true, "loss": "nan"}\n' * 2)
    row = of_lines(path, None).rows[0]
    assert (row.step, row.norm, row.max_norm, row.skipped) == (1, 2.0, 0.5, True)
