"""What the types of gradclip promise: enough programs test them, and few parameters are of any type."""

import ast
from pathlib import Path

import pytest

from typed_programs import FILES, check, wrong_lines

ROOT = Path(__file__).parents[1]


def test_there_are_programs_enough():
    right = [node for path in FILES if path.name != "wrong.py" for node in ast.walk(ast.parse(path.read_text()))]
    assert sum(isinstance(node, ast.FunctionDef) for node in right) >= 50
    assert len(wrong_lines()) >= 60


def test_what_differs_is_seen():
    errors = dict.fromkeys(wrong_lines(), "an error")
    check(errors)
    with pytest.raises(AssertionError):
        check(errors | {("right_torch.py", 1): "an error"})
    errors.popitem()
    with pytest.raises(AssertionError):
        check(errors)


def any_parameters(files):
    """Return of how many annotated parameters the type is `Any`, and how many there are."""
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    annotations = [node.annotation for node in nodes if isinstance(node, ast.arg) and node.annotation is not None]
    return sum(isinstance(one, ast.Name) and one.id == "Any" for one in annotations), len(annotations)


def test_few_parameters_are_any():
    files = sorted((ROOT / "src" / "gradclip").rglob("*.py"))
    # What works with any framework's objects, and the protocols for it.
    of_frameworks, protocols = {"backends", "batching", "native"}, {"protocols.py", "values.py", "tree.py"}
    frameworks = [path for path in files if (of_frameworks | protocols) & set(path.parts)]
    untyped, parameters = any_parameters([path for path in files if path not in frameworks])
    assert untyped <= 0.03 * parameters, (untyped, parameters)
    more_untyped, more = any_parameters(frameworks)
    assert untyped + more_untyped <= 0.05 * (parameters + more), (untyped, more_untyped, parameters, more)


def test_parameters_that_are_any_are_counted(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("def f(a: Any, /, b: int, *c: Any, d: list[Any], e=1) -> Any:\n    return lambda x: x\n")
    assert any_parameters([path]) == (2, 4)
