import pytest

from gradclip._src.logs.rows import LogError
from gradclip._src.logs.text import columns_of, of_table


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("step,grad_norm\n1,2\n", [(1, 2.0)]),
        ("step;grad_norm\n1;2\n", [(1, 2.0)]),
        ("grad_norm\n1.5\n\n2.5\n", [(None, 1.5), (None, 2.5)]),
        ('"step","a, b","grad_norm"\n"1","x,y","2"\n', [(1, 2.0)]),
        ("step,grad_norm\n1,\n2,3\n4\n5,6,7\nstep,grad_norm\n8,9\n", [(2, 3.0), (5, 6.0), (8, 9.0)]),
        ("\n\nstep,grad_norm\n1,2", [(1, 2.0)]),
        ("step, grad_norm , loss\n1, 2, 3\n", [(1, 2.0)]),
        ('step, "grad_norm"\n1, "2"\n', [(1, 2.0)]),
    ],
)
def test_tables(tmp_path, text, rows):
    path = tmp_path / "a.csv"
    path.write_text(text)
    assert [(row.step, row.norm) for row in of_table(path, None).rows] == rows


def test_a_field_that_never_ends(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('step,grad_norm\n1,"' + "x\n" * 200_000)
    with pytest.raises(LogError, match="has no numbers named grad_norm"):
        of_table(path, None)


def test_a_long_field_costs_its_row_only(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('step,grad_norm,note\n1,2.5,a\n2,3.5,"' + "x" * 200_000 + '"\n3,4.5,b\n')
    log = of_table(path, None)
    assert [(row.step, row.norm) for row in log.rows] == [(1, 2.5), (3, 4.5)]
    assert log.notes == ("1 row could not be read: field larger than field limit (131072).",)


def test_the_first_line_of_a_table():
    assert columns_of("a,b") == (["a", "b"], ",")
    assert columns_of("a\tb,c\td") == (["a", "b,c", "d"], "\t")
    assert columns_of("words") is None


def test_norms_that_are_no_numbers_are_told(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("step;grad_norm;loss\n1;0,73;2\n2;1;2\n3;;2\n4;high;2\n")
    log = of_table(path, None)
    assert [(row.step, row.norm) for row in log.rows] == [(2, 1.0)]
    assert log.notes == ("2 norms are no numbers: they are left out.",)
