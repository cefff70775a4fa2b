import json
import math
import os
import tracemalloc

import pytest

import training_logs
from gradclip._src.logs import rows as rows_module
from gradclip._src.logs.read import read
from gradclip._src.logs.rows import Log, LogError, Row
from gradclip._src.logs.summary import Summary


def test_a_run_is_summed_up(tmp_path):
    summary = Summary.of(read(training_logs.written(tmp_path, "trainer_state.json")))
    above = sum(norm > 1.0 for norm in training_logs.NORMS)
    assert summary.counts == (40, above, 0, 0)
    assert (summary.max_norm, summary.assumed, summary.gap, summary.repeated) == (1.0, True, 10, 0)
    assert [spike.step for spike in summary.spikes] == [200]
    text = "\n".join(summary.lines())
    assert "trainer_state.json of Hugging Face's Trainer: 40 steps from 10 to 400, one of every 10." in text
    assert f"Clipped: {above} of 40 logged steps" in text
    assert "1 is the program's default: say another with --max-norm." in text
    assert "Step 200: the norm was 40" in text
    plain = summary.plain()
    assert plain["advice"]["state"] == summary.advice.state
    assert plain["spikes"][0]["step"] == 200


def test_what_the_user_says_of_the_threshold_counts():
    log = Log("text", [Row(step, 1.0, max_norm=0.5) for step in range(30)], 1.0, True)
    assert Summary.of(log).max_norm == 0.5
    said = Summary.of(log, 2.0)
    assert (said.max_norm, said.assumed, said.counts.num_clipped) == (2.0, False, 0)
    assert Summary.of(log, math.inf).counts.num_clipped == 0


def test_without_a_threshold_the_shares_above_common_ones_are_told():
    text = "\n".join(Summary.of(Log("text", [Row(step, 2.0) for step in range(30)])).lines())
    assert "100.0% above 1, 0.0% above 3" in text
    assert "The log does not say whether the norms were measured before clipping" in text


def test_norms_that_were_logged_after_clipping_are_noticed():
    norms = [1.0 if step % 2 else 0.3 + step / 100 for step in range(40)]
    log = Log("a table (CSV)", [Row(step, norm) for step, norm in enumerate(norms)])
    assert any(
        "50.0% of the norms equal the largest, 1: they were probably logged after" in note
        for note in Summary.of(log).notes()
    )
    before = log._replace(measured="before clipping")
    assert not any("equal the largest" in note for note in Summary.of(before, 2.0).notes())
    assert Summary.of(before, 1.0).notes()[1] == (
        "Yet 50.0% of the norms equal the largest, 1, which is max_norm: something had probably clipped the gradients "
        "before, so the run's spikes cannot be seen."
    )


def test_advice_without_a_loss_is_for_somebody_who_has_a_log():
    said = str(Summary.of(Log("text", [Row(step, 1.0 + step % 3) for step in range(40)])).advice)
    assert "Log it beside the norm" in said
    assert "monitor" not in said


def test_steps_that_were_logged_again():
    rows = [Row(step, 1.0) for step in (1, 2, 3, 2, 3, 4)]
    notes = Summary.of(Log("text", rows)).notes()
    assert "2 steps were logged again later, as after a restart or by another process: the last counts." in notes
    assert not any("The last run" in note for note in notes)


def test_a_second_run_in_the_log_that_ends_before_the_first():
    rows = [Row(step, 1.0) for step in (1, 2, 3, 4, 5, 1, 2)]
    notes = Summary.of(Log("text", rows)).notes()
    assert "The last run in the log ends at step 2: later steps are of a run before." in notes


def test_norms_without_a_step_are_left_out():
    rows = [Row(1, 1.0), Row(None, 50.0), Row(2, 1.0), Row(3, 1.0)]
    summary = Summary.of(Log("text", rows, 2.0))
    assert "1 norm has no step: it is left out." in summary.notes()
    assert (summary.counts.steps, summary.counts.num_clipped, summary.repeated) == (3, 0, 0)


def test_one_is_told_as_one():
    rows = [Row(1, math.nan), Row(2, 1.0), Row(2, 1.0)]
    text = "\n".join(Summary.of(Log("text", rows)).lines())
    assert "1 norm is NaN or infinite." in text
    assert "1 step was logged again later" in text


def test_norms_of_zero_are_not_taken_for_clipped_ones():
    assert not any(
        "equal the largest" in note for note in Summary.of(Log("x", [Row(step, 0.0) for step in range(40)])).notes()
    )


@pytest.mark.parametrize("norm", [0.0, math.nan, math.inf, 1e-320, 1e308])
def test_a_single_step(norm):
    summary = Summary.of(Log("text", [Row(None, norm)]))
    assert summary.lines()[0] == "text: 1 step."
    assert summary.plain()["advice"]["state"] == "too few"


def test_the_memory_for_many_rows():
    rows = [Row(step, 1.0 + step % 7) for step in range(100_000)]
    Summary.of(Log("x", rows[:100]))
    tracemalloc.start()
    Summary.of(Log("x", rows))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most / len(rows) < 375  # bytes


CLIPPED = {
    "a.json": lambda rows: json.dumps({"log_history": rows}),
    "a.jsonl": lambda rows: "\n".join(map(json.dumps, rows)),
    "a.csv": lambda rows: "\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]),
}


@pytest.mark.parametrize("name", CLIPPED)
def test_norms_before_and_after_clipping_say_the_threshold(tmp_path, name):
    """As gradclip's callbacks log them: the Trainer's own threshold is 0 then."""
    norms = [0.25 + step % 4 for step in range(40)]
    rows = [
        {
            "step": step,
            "loss": 2.0,
            "learning_rate": 0.1,
            "epoch": 1,
            "grad_norm": norm,
            "grad_norm_clipped": min(norm, 0.5),
        }
        for step, norm in enumerate(norms)
    ]
    (tmp_path / name).write_text(CLIPPED[name](rows))
    summary = Summary.of(read(tmp_path / name))
    assert (summary.counts.num_clipped, summary.max_norm, summary.assumed) == (30, 0.5, False)
    assert Summary.of(read(tmp_path / name), 2.0).counts.num_clipped == 20


def test_a_step_above_the_last_threshold_that_was_not_clipped_had_none():
    rows = [Row(1, 2.0, max_norm=1.0), Row(2, 0.5), Row(3, 3.0), Row(4, 4.0, max_norm=2.0)]
    assert [step.max_norm for step in Summary.of(Log("text", rows)).steps] == [1.0, 1.0, math.inf, 2.0]


def test_norms_that_a_scaler_has_multiplied_get_no_threshold():
    log = Log("text", [Row(step, 2.0**16 * (1 + step % 3), max_norm=1.0) for step in range(30)])
    advice = Summary.of(log).advice
    assert (advice.max_norm, advice.try_values) == (None, ())
    assert "scaler.unscale_(optimizer)" in str(advice)
    assert "unscale_" not in str(Summary.of(log, 1000.0).advice)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.json", "a.log"])
def test_no_log_fills_the_memory(tmp_path, monkeypatch, name):
    lines = {
        "a.csv": ["step,grad_norm", *(f"{step},1.5" for step in range(20))],
        "a.jsonl": [f'{{"step": {step}, "grad_norm": 1.5}}' for step in range(20)],
        "a.json": ["[" + ",".join(['{"grad_norm": 1.5}'] * 20) + "]"],
        "a.log": [f"step {step} grad_norm: 1.5" for step in range(20)],
    }
    (tmp_path / name).write_text("\n".join(lines[name]))
    assert len(read(tmp_path / name).rows) == 20
    monkeypatch.setattr(rows_module, "MOST_ROWS", 19)
    with pytest.raises(rows_module.LogError, match="more than 19 numbers"):
        read(tmp_path / name)


def notes_of(path, text):
    path.write_text(text)
    log = read(path)
    return log.kind, [note for note in Summary.of(log).notes() if "before clipping" not in note]


COUNTED = "The log numbers no steps, or not most: its norms are counted instead."
GUESSES = {
    "a clean table": ("step,loss,grad_norm\n1,2,0.5\n2,1,0.7\n", []),
    "a clean text": ("max_norm: 1.0\nstep: 1 grad_norm: 0.5\nstep: 2 grad_norm: 0.7\n", []),
    "thresholds named alike": ("max_norm: 1\nclip_grad = 1.0\nstep: 1 grad_norm: 0.5\n", []),
    "no steps": (
        "loss,grad_norm\n2,0.5\n1,0.7\n",
        [COUNTED],
    ),
    "parts of steps": (
        "step,grad_norm\n1.5,1\n2.5,1\n",
        [COUNTED],
    ),
    "two names of each": (
        "step,global_step,grad_norm,gnorm,val/grad_norm\n1,1,0.5,9,9\n",
        ["Of entries that mean the same, these are read: grad_norm, not gnorm; step, not global_step."],
    ),
    "two losses of lines": (
        '{"step": 1, "grad_norm": 0.5, "lm_loss": 1, "loss": 2}\n' * 2,
        [
            "1 step was logged again later, as after a restart or by another process: the last counts.",
            "Of entries that mean the same, these are read: loss, not lm_loss.",
        ],
    ),
    "two thresholds": (
        '[{"step": 1, "grad_norm": 0.5, "max_norm": 1, "clip_grad": 2}]',
        ["Of entries that mean the same, these are read: max_norm, not clip_grad."],
    ),
    "the mean loss of a run of Hugging Face's Trainer": (
        '{"step": 1, "grad_norm": 0.5, "loss": 2}\n{"step": 2, "grad_norm": 0.5, "loss": 1}\n'
        '{"step": 2, "train_loss": 1.5}\n',
        [],
    ),
    "the same in a table": ("step,loss,train_loss,grad_norm\n1,2,,0.5\n2,1,1.5,0.7\n", []),
    "norms below zero": (
        "step,grad_norm\n1,0.5\n2,-1\n3,-1\n",
        ["2 norms are below 0: they count as not finite."],
    ),
    "a text of norms below zero": (
        "step: 1 grad_norm: 0.5\nstep: 2 grad_norm: -1.0\n",
        ["1 norm is below 0: it counts as not finite."],
    ),
    "commas of thousands": (
        "step: 1 grad_norm: 1,234\nstep: 2 grad_norm: 2,234.5\n",
        ["The comma in 1,234 is read as one of thousands."],
    ),
    "several thresholds": (
        "max_norm: 0.5\nclip_grad: 2.0\nstep: 1 grad_norm: 1.0\nmax_norm: 3.0\nstep: 2 grad_norm: 1.0\n",
        ["The log names several thresholds, 0.5, 2, 3: 2 counts."],
    ),
    "several thresholds after the norms": (
        "step: 1 grad_norm: 1.0\nmax_norm: 3.0\nmax_norm: 4.0\nstep: 2 grad_norm: 1.0\n",
        ["The log names several thresholds, 3, 4: none before the first norm, so none counts."],
    ),
}


@pytest.mark.parametrize("case", GUESSES)
def test_each_guess_is_told_in_one_line_and_a_clean_log_has_none(tmp_path, case):
    text, expected = GUESSES[case]
    assert notes_of(tmp_path / "run.log", text)[1] == expected


def test_what_separates_columns_is_told_if_it_is_no_comma(tmp_path):
    rows = "step,grad_norm\n1,0.5\n2,0.7\n"
    kinds = [notes_of(tmp_path / "run.csv", rows.replace(",", by))[0] for by in ",;\t"]
    assert kinds == ["a table (CSV)", "a table (CSV with semicolons)", "a table (CSV with tabs)"]


def test_decimal_commas_are_an_error_if_most_norms_have_them(tmp_path):
    for text in ("step;grad_norm\n1;0,5\n2;0,7\n3;1\n", 'step,grad_norm\n1,"0,5"\n', '{"grad_norm": "0,5"}\n' * 2):
        with pytest.raises(LogError, match=r"decimal commas, such as 0,5\. Write them with points\."):
            notes_of(tmp_path / "run.log", text)
    assert notes_of(tmp_path / "run.log", "step;grad_norm\n1;0.5\n2;1\n3;0,7\n")[1] == [
        "1 norm is no number: it is left out."
    ]


def test_the_state_that_is_read_of_several_is_told(tmp_path):
    for step in (10, 20):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        path = folder / "trainer_state.json"
        path.write_text(json.dumps({"log_history": [{"step": step, "grad_norm": 0.5}]}))
        os.utime(path, (step, step))
    assert read(tmp_path).notes == ("checkpoint-20/trainer_state.json is read, the newest of 2 states.",)
    assert read(tmp_path / "checkpoint-10").notes == ()


def test_thresholds_that_differ_are_told():
    rows = [Row(1, 1.0, max_norm=0.5), Row(2, 0.4), Row(3, 1.0, max_norm=2.0)]
    lines = Summary.of(Log("text", rows)).lines()
    assert any(line.endswith("with max_norm = 2, the last of thresholds from 0.5 to 2.") for line in lines)
    assert any(line.endswith("with max_norm = 3.") for line in Summary.of(Log("text", rows), 3.0).lines())
