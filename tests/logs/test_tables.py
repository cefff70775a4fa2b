import pytest

from gradclip.logs.rows import LogError
from gradclip.logs.tables import columns_of, of_table


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("step,grad_norm\n1,2\n", [(1, 2.0)]),
        ("step;grad_norm\n1;2\n", [(1, 2.0)]),
        ("grad_norm\n1.5\n\n2.5\n", [(None, 1.5), (None, 2.5)]),
        ('"step","a, b","grad_norm"\n"1","x,y","2"\n', [(1, 2.0)]),
        ("step,grad_norm\n1,\n2,3\n4\n5,6,7\nstep,grad_norm\n8,9\n", [(2, 3.0), (5, 6.0), (8, 9.0)]),
        ("\n\nstep,grad_norm\n1,2", [(1, 2.0)]),
    ],
)
def test_tables(tmp_path, text, rows):
    path = tmp_path / "a.csv"
    path.write_text(text)
    assert [(row.step, row.norm) for row in of_table(path, None).rows] == rows


def test_a_field_that_never_ends(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('step,grad_norm\n1,"' + "x\n" * 200_000)
    with pytest.raises(LogError, match="is no readable table: field larger than field limit"):
        of_table(path, None)


def test_the_first_line_of_a_table():
    assert columns_of("a,b") == (["a", "b"], ",")
    assert columns_of("a\tb,c\td") == (["a", "b,c", "d"], "\t")
    assert columns_of("words") is None
