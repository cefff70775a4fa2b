import json

import pytest

import training_logs
from gradclip._src.logs.json_files import of_document, of_lines
from gradclip._src.logs.read import read
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


def test_a_key_names_an_entry_within_others(tmp_path):
    path = tmp_path / "result.json"
    steps = [{"env": {"steps": 1}, "learners": {"policy": {"my_norm": n, "loss": 0.5}}, "step": n} for n in (1, 2)]
    for text in ("".join(json.dumps(one) + "\n" for one in steps), json.dumps(steps), json.dumps(steps[0], indent=1)):
        path.write_text(text)
        rows = read(path, "learners/policy/my_norm").rows
        assert [(row.step, row.norm, row.loss) for row in rows][:1] == [(1, 1.0, 0.5)]
        with pytest.raises(LogError, match="Its entries are env/steps, learners/policy/loss"):
            read(path)


def test_entries_that_hold_each_other_deeply_are_no_log(tmp_path):
    path = tmp_path / "deep.json"
    path.write_text('{"a": ' * 500 + '{"grad_norm": 1.5}' + "}" * 500)
    with pytest.raises(LogError, match="no norms of gradients"):
        read(path)


def test_the_list_that_has_the_norms_counts(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"eval": [{"loss": 1.0}], "train": [{"m": {"grad_norm": 2.0}, "step": 4}]}))
    assert [(row.step, row.norm) for row in read(path).rows] == [(4, 2.0)]
