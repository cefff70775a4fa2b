"""What a type checker tells users: a tree comes back as the type it went in, and a wrong word is an error."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
USED = """
from collections.abc import Iterator
from fractions import Fraction
import numpy as np
import gradclip
from gradclip import Sensitivity
from gradclip.typing import HasGrad

Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Dict = dict[str, Array]

def calls(tree: Dict, one: Array, parameters: Iterator[HasGrad], name: str, flags: list[bool]) -> None:
"""
RIGHT = {
    "gradclip.clip_by_global_norm(tree, 1.0)[0]": "Dict",
    "gradclip.clip_by_global_norm(one, np.float32(1), ord='inf', nonfinite='raise')[0]": "Array",
    "gradclip.clip_by_global_norm((one, [one]), Fraction(1, 3), axis_name=('a', 'b'))[0]": "tuple[Array, list[Array]]",
    "gradclip.clip_by_layer_norm(tree, {'w': 1.0})[0]": "Dict",
    "gradclip.clip_by_value(tree, one)": "Dict",
    "gradclip.partial_norm(tree).clip(tree, 1)": "Dict",
    "gradclip.per_example_clip(tree, 1.0, mask=flags, rule='automatic', sum_dtype=np.float64)[0]": "Dict",
    "gradclip.per_example_clip(one, 1.0, mask=one > 0, sum_dtype=np.dtype('float64'))[1]": "gradclip.PerExampleInfo",
    "gradclip.clipped_grad(max, 1.0, unit='group', method='loop')": "gradclip.ClippedFunction",
    "gradclip.clipped_fun(max, 1.0, batch_argnums=(0, 1))": "gradclip.ClippedFunction",
    "gradclip.clipped_fun(max, 1.0).sensitivity('zero_out', summed_in='float32')": "Sensitivity",
    "gradclip.clipped_sum_sensitivity({'w': 3.0}, 'replace_one', partial_sums_in='bfloat16')": "Sensitivity",
    "gradclip.norm_at_most(tree, 1.0)": "bool",
    "gradclip.check_sensitivity(lambda x: x, tree, 1.0, dtypes=['float16'])": "gradclip.SensitivityReport",
    "gradclip.clip_grad_norm_(parameters, 1.0, '-inf', nonfinite='drop')": None,
    "gradclip.clip_grad_norm_([{'params': parameters}], 1.0, process_group=[])": None,
    "gradclip.clip_grad_norm_(tree, 1.0)": None,
    "gradclip.clip_grad_norm_(tree, 1.0, monitor=gradclip.Monitor(callback=lambda step, numbers: None))": None,
    "gradclip.Monitor.load('steps.jsonl')": "gradclip.Monitor",
    "gradclip.Monitor().advise().max_norm": "float | None",
    "gradclip.clip_grad_layer_norm_(parameters, [1.0, 2.0])": None,
    "gradclip.grad_norm(next(parameters), None)": None,
}
WRONG = [
    "gradclip.clip_by_global_norm(tree, 1.0, nonfinite='bogus')",
    "gradclip.clip_by_global_norm(tree, 1.0, nonfinite=name)",
    "gradclip.clip_by_global_norm(tree, '1.0')",
    "gradclip.clip_by_global_norm(tree, 1.0, ord='two')",
    "gradclip.clip_by_global_norm(tree, 1.0, axis_name=['a'])",
    "gradclip.clip_by_global_norm(tree, 1.0)[0].reshape(-1)",
    "gradclip.per_example_clip(tree, 1.0, rule='clp')",
    "gradclip.per_example_clip(tree, 1.0, sum_dtype='float16')",
    "gradclip.per_example_clip(tree, 1.0, mask=[0.5])",
    "gradclip.clipped_grad(max, 1.0, method='map')",
    "gradclip.clipped_grad(3, 1.0)",
    "gradclip.clipped_fun(max, 1.0).sensitivity('swap')",
    "gradclip.clipped_sum_sensitivity(1.0, summed_in='bfloat16')",
    "Sensitivity(1.0, 'client', relation='zero_out')",
    "gradclip.clip_grad_norm_(3, 1.0)",
    "gradclip.clip_grad_norm_(parameters, 1.0, nonfinite='ignore')",
    "gradclip.clip_grad_norm_(parameters, 1.0, monitor=True)",
]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What mypy says of each line, and in the end of types that are not those expected."""
    lines = [f"    {call}" for call in (*RIGHT, *WRONG)]
    lines += [f"    a{i}: {kind} = {call}" for i, (call, kind) in enumerate(RIGHT.items()) if kind]
    lines += [f"    reveal_type({call})" for call, kind in RIGHT.items() if kind]
    path = tmp_path_factory.mktemp("user") / "user.py"
    path.write_text(USED + "\n".join(lines) + "\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--hide-error-context"]
    done = subprocess.run(
        [*command, "--cache-dir", str(path.parent / "cache"), str(path)], capture_output=True, text=True
    )
    assert done.stderr == ""
    assert done.returncode == 1, done.stdout
    first = USED.count("\n") + 1
    found = re.findall(r"user\.py:(\d+): (error|note): (.*)", done.stdout)
    return [(lines[int(line) - first].strip(), kind, text) for line, kind, text in found]


def test_right_calls_are_right_and_wrong_ones_are_errors(told):
    assert {line for line, kind, _ in told if kind == "error"} == set(WRONG)


def test_no_type_is_any(told):
    revealed = [(line, text) for line, _, text in told if "Revealed type" in text]
    assert len(revealed) == sum(kind is not None for kind in RIGHT.values())
    assert [line for line, text in revealed if '"Any"' in text] == []


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
