import pytest

from gradclip._src.logs.read import read
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


def table_of_runs(path, column="run", step="step,"):
    steps = [f"{at}," if step else "" for at in range(3)]
    rows = [f"{run},{at}{place}{number}.5" for number, run in enumerate("ab") for place, at in enumerate(steps, 1)]
    path.write_text("\n".join([f"{column},{step}grad_norm", *rows]))
    return path


@pytest.mark.parametrize("column", ["run", "Run ID", "seed", "name"])
@pytest.mark.parametrize("step", ["step,", ""])
def test_one_run_of_several_in_a_table_is_read_if_it_is_named(tmp_path, column, step):
    path = table_of_runs(tmp_path / "a.csv", column, step)
    for key, what in ((None, "several runs"), ("grad_norm", "several runs"), ("c - grad_norm", 'no run "c"')):
        words = rf'a.csv has {what}, by its column {column}. Pass --key "a - grad_norm" or "b - grad_norm"'
        with pytest.raises(LogError, match=words):
            read(path, key)
    assert [row.norm for row in read(path, "b - grad_norm").rows] == [11.5, 21.5, 31.5]
    path.write_text("seed,name,step,grad_norm\n7,a,1,2\n7,b,1,3")
    with pytest.raises(LogError, match=r'by its column seed and name. Pass --key "7/a - grad_norm" or "7/b - grad'):
        read(path)


@pytest.mark.parametrize("rows", ["warm,1,1\nmain,2,2\nmain,3,3", "a,1,1\na,2,2\nb,3,3", "a,1,1\n,1,\nb,2,2\n,3,3"])
def test_a_column_that_may_name_runs_does_not_make_one_run_several(tmp_path, rows):
    path = tmp_path / "a.csv"
    path.write_text(f"name,step,grad_norm\n{rows}")
    assert [row.norm for row in read(path).rows] == [1.0, 2.0, 3.0]


def test_columns_of_other_runs_are_not_beside_a_norm(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("Step,b - loss,b - grad_norm,a - grad_norm,a - grad_norm__MIN,a - loss\n1,2,3,4,5,6\n2,2,3,4,5,6\n")
    with pytest.raises(LogError, match=r"several entries may be the norm: a - grad_norm, b - grad_norm. Name one with"):
        read(path)
    assert [(row.norm, row.loss) for row in read(path, "a - grad_norm").rows] == [(4.0, 6.0)] * 2
