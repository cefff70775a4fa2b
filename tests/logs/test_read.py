"""Logs in all formats say the same; those that are damaged, hostile or no logs at all give one clear line."""

import gzip
import math
import os
import random
import sys

import pytest

import training_logs
from gradclip._src.logs.read import read
from gradclip._src.logs.rows import LogError
from gradclip._src.logs.summary import Summary

PLAIN = ("megatron.log", "torchtitan.log", "trainer.log")  # rounded
WITHOUT_STEPS = ("trainer.log",)
WITHOUT_LOSSES = ("exported.csv",)
DAMAGES = 300


@pytest.mark.parametrize("name", training_logs.FILES)
def test_all_formats_say_the_same(tmp_path, name):
    rows = read(training_logs.written(tmp_path, name)).rows
    near = 1e-3 if name in PLAIN else 1e-6 if "tfevents" in name else 1e-15 if name == "groups.log" else 0.0
    assert [row.norm for row in rows] == pytest.approx(training_logs.NORMS, rel=near, abs=0)
    if name not in WITHOUT_LOSSES:
        assert [row.loss for row in rows] == pytest.approx(training_logs.LOSSES, rel=max(near, 0), abs=0)
    steps = [None] * len(rows) if name in WITHOUT_STEPS else list(training_logs.STEPS)
    assert [row.step for row in rows] == steps


@pytest.mark.parametrize(
    ("name", "max_norm", "assumed", "measured"),
    [
        ("trainer_state.json", 1.0, True, "before clipping"),
        ("lines.jsonl", 1.0, True, "before clipping"),
        ("monitor.jsonl", math.nan, False, "before clipping"),
        ("table.csv", math.nan, False, ""),
        ("megatron.log", 0.5, False, "before clipping"),
        ("torchtitan.log", 1.0, True, "before clipping"),
        ("trainer.log", 1.0, True, "before clipping"),
        ("events.out.tfevents.1", math.nan, False, ""),
    ],
)
def test_what_a_format_says_of_the_threshold_and_the_norms(tmp_path, name, max_norm, assumed, measured):
    log = read(training_logs.written(tmp_path, name))
    assert log.max_norm == pytest.approx(max_norm, nan_ok=True)
    assert (log.assumed, log.measured) == (assumed, measured)


def test_a_folder_of_checkpoints_and_one_of_tensorboard(tmp_path):
    for number in (100, 400):
        (tmp_path / f"checkpoint-{number}").mkdir()
    training_logs.written(tmp_path / "checkpoint-400", "trainer_state.json")
    assert len(read(tmp_path).rows) == len(training_logs.RUN)
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    training_logs.written(run, "events.out.tfevents.1")
    assert len(read(tmp_path / "runs").rows) == len(training_logs.RUN)
    second = tmp_path / "runs" / "second"
    second.mkdir()
    training_logs.written(second, "events.out.tfevents.1")
    with pytest.raises(LogError, match=r"has several runs: first, second\. Pass one of them"):
        read(tmp_path / "runs")


def test_a_file_in_utf_16_and_one_with_a_mark(tmp_path):
    path = tmp_path / "table.csv"
    for encoding in ("utf-16", "utf-8-sig"):
        path.write_text(training_logs.table(), encoding=encoding)
        assert len(read(path).rows) == len(training_logs.RUN)


HOSTILE = {
    "empty": (b"", "is empty"),
    "spaces": (b" \n\t\n", "holds nothing but spaces"),
    "zeros": (bytes(1000), "is no text"),
    "binary": (bytes(range(256)) * 40, "is no text"),
    "random": (random.Random(0).randbytes(100_000), "is no text"),
    "words": (b"nothing to see\n" * 10, r"has no norms of gradients\.$"),
    "deep": (b'{"log_history":' + b"[" * 200_000, "has no norms of gradients"),
    "deep objects": (b'{"a":' * 200_000, "has no norms of gradients"),
    "an empty object": (b"{}", "has no norms of gradients"),
    "no history": (b'{"log_history": []}', "has no norms of gradients"),
    "a history of numbers": (b'{"log_history": [1, 2, null, "a"]}', "has no norms of gradients"),
    "null norms": (b'{"log_history": [{"grad_norm": null, "step": 1}]}', "has no numbers named grad_norm"),
    "norms of words": (b'{"log_history": [{"grad_norm": "high", "step": 1}]}', "has no numbers named grad_norm"),
    "lines of words": (b'{"grad_norm": "high"}\n' * 3, "has no numbers named grad_norm"),
    "decimal commas": (b"step;grad_norm\n1;0,5\n", r"numbers with decimal commas, such as 0,5\. Write them with"),
    "a table without names": (b"1,2.5,0.9\n2,2.7,0.8\n", r"begins with numbers.*, such as step,grad_norm,loss\.$"),
    "a column without a name": (b'"2.5"\n2.7\n', r"begins with numbers.*in a first line, such as grad_norm\.$"),
    "a table of nothing": (b"step,grad_norm\n", r"Its entries are grad_norm, step"),
    "a table without a norm": (b"step,loss\n1,2\n", r"Its entries are loss, step\. If one is the norm, name it"),
    "two norms": (b'[{"actor/grad_norm": 1, "critic/grad_norm": 2}]', r"several entries .*actor/grad_norm, critic/gra"),
    "half a zip": (gzip.compress(b"step,grad_norm\n1,2\n" * 1000)[:15], "is empty|has no norms"),
    "no zip": (b"\x1f\x8b" + b"\0" * 50, "is empty"),
    "one long line": (b"x" * 3_000_000, "has no norms of gradients"),
    "a long number": (b'{"log_history": [{"grad_norm": ' + b"9" * 10_000 + b"}]}", "has no norms of gradients"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_log_gives_one_line(tmp_path, name):
    content, message = HOSTILE[name]
    path = tmp_path / "log"
    path.write_bytes(content)
    with pytest.raises(LogError, match=message) as raised:
        read(path)
    assert len(str(raised.value).splitlines()) == 1
    assert len(str(raised.value)) < 1000


def test_what_is_not_there_or_no_file(tmp_path):
    for path, message in (
        (tmp_path / "none", "does not exist"),
        (tmp_path, "is a folder without trainer_state.json"),
        ("/dev/null", "is no file"),
        ("a\0b", "does not exist"),
        ("a" * 5000, "could not be read"),
    ):
        with pytest.raises(LogError, match=message):
            read(path)


def test_a_pipe_in_a_folder_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "trainer_state.json")
    with pytest.raises(LogError, match=r"is a folder without trainer_state\.json"):
        read(tmp_path)


def test_unusual_numbers_are_read(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text(
        '{"step": 1, "grad_norm": NaN}\n{"step": "2/9", "grad_norm": "Infinity"}\n{"step": 3, "grad_norm": "1.5"}\n'
        '{"step": 4, "grad_norm": -1}\n{"step": 5, "grad_norm": 1e999}\n{"step": -6, "grad_norm": 1}\n'
        '{"step": 1e300, "grad_norm": 2}\n{"step": 7.5, "grad_norm": null}\nnot a line\n{"step": 8}\n[1]\n'
    )
    log = read(path)
    assert [row.step for row in log.rows] == [1, 2, 3, 4, 5, None, None]
    norms = [row.norm for row in log.rows]
    assert norms == pytest.approx([math.nan, math.inf, 1.5, math.nan, math.inf, 1.0, 2.0], nan_ok=True)
    assert log.notes == ("1 norm is below 0: it counts as not finite.", "2 lines are no JSON objects.")


def test_a_key_names_the_norm(tmp_path):
    path = tmp_path / "two.json"
    path.write_text('[{"actor/grad_norm": 1, "critic/grad_norm": 2}]')
    assert read(path, "critic/grad_norm").rows[0].norm == 2.0
    with pytest.raises(LogError, match="has no numbers named loss"):
        read(path, "loss")


@pytest.mark.parametrize("name", training_logs.FILES)
def test_a_file_that_is_cut_off_gives_what_is_whole(tmp_path, name):
    content = training_logs.written(tmp_path, name).read_bytes()
    path = tmp_path / f"cut_{name}"
    path.write_bytes(content[: len(content) * 3 // 4])
    if name == "columns.json":
        with pytest.raises(LogError):
            read(path)
        return
    rows = read(path).rows
    assert len(rows) > 20
    near = 1e-3 if name in PLAIN else 1e-6
    assert [row.norm for row in rows[:-1]] == pytest.approx(training_logs.NORMS[: len(rows) - 1], rel=near)


def damaged(content, draw):
    """Return bytes with one kind of damage."""
    content = bytearray(content)
    at = draw.randrange(len(content))
    kind = draw.randrange(7)
    if kind == 0:
        del content[at:]
    elif kind == 1:
        content[at] ^= 1 << draw.randrange(8)
    elif kind == 2:
        content[at : at + draw.randrange(200)] = draw.randbytes(draw.randrange(200))
    elif kind == 3:
        content[at:at] = content[draw.randrange(len(content)) :][: draw.randrange(500)]
    elif kind == 4:
        content[at : at + draw.randrange(2000)] = b"\0" * draw.randrange(2000)
    elif kind == 5:
        word = draw.choice([b"nan", b"-Infinity", b"1e400", b'"', b"{", b"]", b"\n", b",", b"\xff\xfe", b"null"])
        content[at:at] = word * draw.randrange(1, 5)
    else:
        draw.shuffle(content) if draw.random() < 0.1 else content.reverse()
    return bytes(content)


def outcome(path):
    try:
        return read(path), ""
    except LogError as error:
        return None, str(error)


@pytest.mark.parametrize("name", training_logs.FILES)
def test_no_damage_does_more_than_raise_one_line(tmp_path, name):
    content = training_logs.written(tmp_path, name).read_bytes()
    path = tmp_path / f"damaged_{name}"
    draw = random.Random(name)
    read_well = 0
    for _ in range(DAMAGES):
        path.write_bytes(damaged(content, draw))
        log, message = outcome(path)
        assert len(message.splitlines()) <= 1
        if log is None:
            continue
        summary = Summary.of(log)
        assert summary.lines()
        assert all(step.norm >= 0 or math.isnan(step.norm) for step in summary.steps)
        read_well += 1
    assert 0 < read_well < DAMAGES


def test_a_line_without_end_takes_no_memory(tmp_path):
    path = tmp_path / "long.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(150):
            file.write(b"x" * 2**20)
        file.write(b'\n{"step": 1, "grad_norm": 2.5}\n{"step": 2, "grad_norm": 2.5}\n')
    if sys.platform.startswith("linux"):
        import resource

        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert [row.norm for row in read(path).rows] == [2.5, 2.5]
    if sys.platform.startswith("linux"):
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_the_text_of_deepspeed_which_prints_no_norms(tmp_path):
    path = tmp_path / "train.log"
    line = "[2025-01-01 00:00:00,000] [INFO] [logging.py:96:log_dist] [Rank 0] step=1, skipped=0, lr=[0.0001], mom=[]\n"
    path.write_text(line * 3)
    with pytest.raises(LogError, match=r"DeepSpeed prints none\. To record them, call gradclip\.clip_at"):
        read(path)
