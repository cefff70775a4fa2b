"""Numbers as people read them, and tables of text."""

import math

import pytest

from gradclip._src.monitor.page.tables import cut, number, percent, table, times


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [
        (446.0, 1.0, "446 x"),
        (44600.0, 1.0, "44,600 x"),
        (1.0, 2.0, "0.5 x"),
        (7.1, 1.0, "7.1 x"),
        (1e12, 1.0, "1e+12 x"),
        (1.0, 0.0, ""),
        (1.0, math.inf, ""),
        (math.nan, 1.0, ""),
        (math.inf, 1.0, ""),
        (0.0, 1.0, ""),
        (1e300, 1e-300, ""),
    ],
)
def test_factors_are_never_percentages(value, unit, said):
    assert times(value, unit) == said


def test_numbers():
    assert [number(value) for value in (0.5, 999.94, 12345.6, 2e6)] == ["0.5", "999.9", "12,346", "2e+06"]
    assert [number(value) for value in (0.0, math.inf, -math.inf, math.nan)] == ["0", "inf", "-inf", "NaN"]


def test_one_step_of_many_is_no_share_of_zero():
    assert [percent(share) for share in (0.5, 1.0, 0.0, 0.002, 1e-4, 1.23e-6)] == [
        *("50.0%", "100.0%", "0.0%", "0.2%", "0.01%", "0.00012%")
    ]


def test_what_is_too_long_is_cut():
    assert cut("abcdef", 6) == "abcdef"
    assert cut("abcdefg", 6) == "abcde…"
    assert cut("a\nb", 6) == "a\\nb"


def test_text_in_tables_is_escaped():
    text = table(("<a>", "b"), [("x & y", "\x00")])
    assert "<th class=words>&lt;a&gt;</th><th class=number>b</th>" in text
    assert "<td class=words>x &amp; y</td><td class=number>\\x00</td>" in text
