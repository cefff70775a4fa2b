"""Lines as programs print them, in public logs."""

import math

import pytest

from gradclip._src.logs.rows import LogError
from gradclip._src.logs.text import holds_norm, of_text

LINES = {
    "Megatron-DeepSpeed": (
        " iteration    12695/  115311 | consumed samples: 9841584 | learning rate: 5.969E-05 | lm loss: 2.463556E+00 | "
        "grad norm: 0.174 | num zeros: 0.0 |",
        (12695, 0.174, 2.463556),
    ),
    "a norm that is NaN": (
        " [default7]: iteration  5426/  250000 | loss scale: 1.0 | grad norm: nan | actual seqlen:  2048 |",
        (5426, math.nan, math.nan),
    ),
    "InternEvo": (
        "[2024-02-27 15:45:08] iteration 13 / 118 | lm loss: 6.233628E-01 | loss scale: 1.0 |total grad norm: 2.773 |",
        (13, 2.773, 0.6233628),
    ),
    "torchtitan": (
        "[rank0]:[titan] - INFO - step: 10  loss:  6.1234  grad_norm:  1.2345  memory:  1.1GiB",
        (10, 1.2345, 6.1234),
    ),
    "Trainer 4": (
        "{'loss': 0.5, 'grad_norm': 1.25, 'learning_rate': 5e-05, 'epoch': 0.1}",
        (None, 1.25, 0.5),
    ),
    "Trainer 5": (
        "{'loss': '0.5', 'grad_norm': 'inf', 'learning_rate': '5e-05', 'epoch': '0.1'}",
        (None, math.inf, 0.5),
    ),
    "words": ("Epoch 3 | step 120 | train_loss=0.71 | gradient norm = 3.5e+01", (120, 35.0, 0.71)),
    "mmengine": ("mmengine - Iter [50/1000]  lr: 1e-4  loss: 130.1  grad_norm: 3277.0", (None, 3277.0, 130.1)),
    "thousands": ("step 3: grad_norm=1,234.5, loss=2,001", (3, 1234.5, 2001.0)),
    "loguru": (
        "2026-01-02 | INFO     | run.trainer:step:12 - step=1 loss=0.5 grad_norm=1.25",
        (1, 1.25, 0.5),
    ),
    "loguru, a function named as the norm": ("trainer:grad_norm:12 - step 3 grad_norm: 1.25", (3, 1.25, math.nan)),
    "the names of Python's logging": ("INFO:root:step 5 - grad_norm: 1.25", (5, 1.25, math.nan)),
    "a list after the norm": ("step 3: grad_norm=1,23,456", (3, 1.0, math.nan)),
    "NumPy": ("{'step': 2, 'grad_norm': np.float64(1.25), 'loss': np.float32(0.5)}", (2, 1.25, 0.5)),
    "PyTorch": ("step 4 grad_norm: tensor(3.5, device='cuda:0')", (4, 3.5, math.nan)),
    "fairseq": ("train_inner | epoch 001: 100 / 2000 loss=14.5, ppl=23, gnorm=2.345, clip=0", (None, 2.345, 14.5)),
    "colors whose escape is lost": ("[31mstep: 10  [32mloss:  7.0  [34mgrad_norm:  0.9  [0m", (10, 0.9, 7.0)),
    "verl": ("step:7 - actor/grad_norm:0.53 - actor/lr:1e-06", (7, 0.53, math.nan)),
}


@pytest.mark.parametrize("line", LINES)
def test_a_line(tmp_path, line):
    path = tmp_path / "run.log"
    text, (step, norm, loss) = LINES[line]
    path.write_text(f"starting\n{text}\n")
    (row,) = of_text(path, None).rows
    assert row.step == step
    assert (row.norm, row.loss) == pytest.approx((norm, loss), nan_ok=True)


@pytest.mark.parametrize(
    "line",
    [
        *("grad norms: 1", "grad_norm_clipped: 1", "grad_norm: high", "sgrad_norm: 1", "grad norm 1"),
        *("max grad norm 1.5", "clip grad norm: 1.5", "norm 15.3", "loss 1.5 | weight norm 15.3", "loss 2.5 norm 3"),
        *("grad_norm={'a': high}", "grad-norm quartiles 1.0 2.0 3.0"),
    ],
)
def test_lines_without_a_norm(line):
    assert not holds_norm(line)


@pytest.mark.parametrize(
    ("setting", "max_norm"),
    [
        ("  clip_grad ....................................... 0.25", 0.25),
        ('"max_norm": 2.0,', 2.0),
        ("gradient_clipping ............ 3", 3.0),
        ("max_grad_norm=0.5, seed=1", 0.5),
    ],
)
def test_a_threshold_that_was_printed_before(tmp_path, setting, max_norm):
    path = tmp_path / "run.log"
    path.write_text(f"{setting}\nstep: 1  loss:  6.1  grad_norm:  1.2\nmax_norm: 9\n")
    log = of_text(path, None)
    assert (log.max_norm, log.assumed) == (max_norm, False)


def test_a_progress_bar_and_skipped_steps(tmp_path):
    path = tmp_path / "run.log"
    path.write_bytes(b"10%|#  | step: 1 grad_norm: 1.5\r20%|## | step: 2 grad_norm: 2.5\r\n")
    assert [(row.step, row.norm) for row in of_text(path, None).rows] == [(1, 1.5), (2, 2.5)]
    path.write_text(
        " iteration 10/ 200 | loss scale: 8.0 | number of skipped iterations:  10 |\n"
        " iteration 20/ 200 | grad norm: 23.668 | number of skipped iterations:   5 |\n"
    )
    log = of_text(path, None)
    assert (len(log.rows), log.notes) == (1, ("The program skipped 15 steps.",))


def test_quartiles_are_medians_with_their_threshold(tmp_path):
    path = tmp_path / "run.log"
    line = (
        "Clipping_scale=2.0, grad-norm quartiles 4.1e+01 5.4e+01 6.2e+01 7.6e+01 1.5e+02, threshold=1.24e+02, percent-"
    )
    path.write_text(f"Epoch 1, batch 50, loss[loss=1.5]\nINFO [optim.py:369] {line}clipped=4.0\n" * 2)
    log = of_text(path, None)
    assert [(row.step, row.norm, row.max_norm) for row in log.rows] == [(None, 62.0, 124.0)] * 2
    assert log.notes == ("Each norm is the median of several steps: spikes between them do not show.",)


def test_a_norm_of_that_name_counts_before_others(tmp_path):
    path = tmp_path / "run.log"
    path.write_text("step 1 | loss: 2.5 | norm: 9.5\nstep 2 | loss: 2.5 | norm: 9.5 | grad_norm: 1.5\n")
    assert [(row.step, row.norm) for row in of_text(path, None).rows] == [(2, 1.5)]
    path.write_text("step 1 | loss: 2.5 | norm: 9.5\n")
    assert [(row.step, row.norm) for row in of_text(path, None).rows] == [(1, 9.5)]


def test_a_threshold_beside_a_norm_is_that_of_quartiles_alone(tmp_path):
    path = tmp_path / "run.log"
    path.write_text("step 1 grad_norm=2.5 threshold=0.5\n")
    assert math.isnan(of_text(path, None).rows[0].max_norm)


def test_a_key_names_another_number(tmp_path):
    path = tmp_path / "run.log"
    path.write_text("step: 1 gnorm(all): 1.5\n")
    assert of_text(path, "gnorm(all)").rows[0].norm == 1.5
    with pytest.raises(LogError, match="has no numbers named other"):
        of_text(path, "other")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("step 1: grad_norm=0,731, loss=0,5", "0,731"),
        ("step 1: grad norm: 1,73 | loss: 2", "1,73"),
        ("step 1: grad_norm=12,5e-3", "12,5"),
        ("step 1: loss=0,25 grad_norm=1.5", "0,25"),
    ],
)
def test_numbers_with_decimal_commas_are_an_error_and_not_other_numbers(tmp_path, line, shown):
    path = tmp_path / "log.txt"
    path.write_text(f"{line}\n")
    with pytest.raises(LogError, match=f"decimal commas, such as {shown}. Write them with points"):
        of_text(path, None)
