import math

import pytest

from gradclip._src.logs.rows import Keys, LogError, Row, in_order, number, numbered, plain, whole


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        (["loss", "grad_norm", "step"], ("grad_norm", "loss", "step", None, None)),
        (
            ["train/grad_norm", "eval/loss", "train/loss", "train/global_step"],
            ("train/grad_norm", "train/loss", "train/global_step", None, None),
        ),
        (["Grad Norm", "Step", "lm loss"], ("Grad Norm", "lm loss", "Step", None, None)),
        (["grad-norm", "grad-norm vs samples", "iteration"], ("grad-norm", None, "iteration", None, None)),
        (["grad_norm", "eval_loss", "val/loss", "train_loss"], ("grad_norm", "train_loss", None, None, None)),
        (["global_step/max_steps", "gradient_norm"], ("gradient_norm", None, "global_step/max_steps", None, None)),
        (["run-1 - train/grad_norm"], ("run-1 - train/grad_norm", None, None, None, None)),
        (["grad_norm", "actor/grad_norm"], ("grad_norm", None, None, None, None)),
        (["train/grad_norm", "actor/grad_norm"], ("train/grad_norm", None, None, None, None)),
        (["norm", "max_norm", "skipped", "step"], ("norm", None, "step", "max_norm", "skipped")),
        (["grad_2.0_norm_total", "loss"], ("grad_2.0_norm_total", "loss", None, None, None)),
        (["grad_norm_clipped", "norm", "loss"], None),
        ([], None),
    ],
)
def test_the_entries_of_a_row_are_found(names, keys):
    found = Keys.among(names, None)
    assert found == (keys and Keys(*keys))


def test_a_name_that_the_user_gives_counts_alone():
    assert Keys.among(["grad_norm", "mine"], "mine").norm == "mine"
    assert Keys.among(["grad_norm"], "mine") is None
    with pytest.raises(LogError, match="several entries may be the norm: a/grad_norm, b/grad_norm"):
        Keys.among(["a/grad_norm", "b/grad_norm"], None)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (1, 1.0),
        ("1e3", 1000.0),
        (" 2.5 ", 2.5),
        ("-inf", -math.inf),
        ("Infinity", math.inf),
        (True, 1.0),
        ("false", 0.0),
        (10**400, math.inf),
        (-(10**400), -math.inf),
        (None, None),
        ([1], None),
        ("", None),
        ("high", None),
        ("1" * 65, None),
    ],
)
def test_numbers(value, found):
    assert number(value) == found


def test_nan_is_a_number():
    assert math.isnan(number("NaN"))


@pytest.mark.parametrize(
    ("value", "found"),
    [("12", 12), (12.0, 12), ("3/100", 3), (1.5, None), (-1, None), (1e300, None), ("nan", None), (math.inf, None)],
)
def test_steps(value, found):
    assert whole(value) == found


def test_names_without_their_spelling():
    assert plain("train/Grad Norm") == plain("grad-norm") == plain("my run - train/grad_norm") == "grad_norm"


def test_the_last_row_of_a_step_counts():
    rows = [Row(1, 1.0), Row(2, 2.0), Row(3, 3.0), Row(2, 4.0), Row(3, 5.0)]
    assert in_order(rows) == ([Row(1, 1.0), Row(2, 4.0), Row(3, 5.0)], 2)
    assert in_order([Row(5, 1.0), Row(2, 2.0)]) == ([Row(2, 2.0), Row(5, 1.0)], 0)
    assert in_order([]) == ([], 0)


def test_rows_without_a_step_replace_no_others():
    assert numbered([Row(None, 1.0), Row(None, 2.0)]) == ([Row(1, 1.0), Row(2, 2.0)], -1)
    assert numbered([Row(3, 1.0), Row(None, 9.0), Row(2, 2.0)]) == ([Row(3, 1.0), Row(2, 2.0)], 1)
    assert numbered([Row(7, 1.0), Row(None, 9.0), Row(None, 2.0)]) == ([Row(1, 1.0), Row(2, 9.0), Row(3, 2.0)], -1)
    assert numbered([]) == ([], 0)


def test_rows_that_are_in_order_are_not_copied():
    rows = [Row(1, 1.0), Row(2, 2.0)]
    assert in_order(numbered(rows)[0])[0] is rows


def test_a_norm_below_zero_is_nan():
    row = Keys("grad_norm", None, None, None, None).row({"grad_norm": -1})
    assert math.isnan(row.norm)
    assert Keys("grad_norm", None, None, None, None).row({"loss": 1}) is None
