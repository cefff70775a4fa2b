"""What `make portable` imports and runs. The tests install nothing."""

import importlib
import sys
from pathlib import Path

import pytest

import portable

HALVES = """'Halves.

>>> half(6)
3
'

def half(n):
    'Halve.

    >>> half(4)
    2
    '
    return n // 2
""".replace("'", '"' * 3)
FILES = {
    "__init__": '"""Nothing."""\n',
    "__main__": "raise SystemExit(1)\n",
    "halves": HALVES,
    "inner/__init__": "",
    "inner/needs": "import no_such_package.part\n",
    "inner/shows": '"""Show.\n\n>>> import no_such_package\n>>> no_such_package.x\n1\n"""\n',
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return a package of these files, with a name of its own."""
    name = f"portable_{tmp_path.name}"
    monkeypatch.syspath_prepend(tmp_path)
    for file, text in FILES.items():
        path = tmp_path / name / f"{file}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    importlib.invalidate_caches()
    yield importlib.import_module(name)
    for found in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[found]


def path_of(package, file):
    return Path(package.__file__).with_name(file)


def test_every_module_is_imported_and_its_examples_run(package, capsys):
    assert portable.run_examples(package) == (2, 0)
    assert capsys.readouterr().out.splitlines() == [
        "modules imported: 4; not without another package: 1",
        "  no_such_package: 1",
    ]


def test_a_wrong_example_fails(package, capsys):
    path_of(package, "wrong.py").write_text('"""Add.\n\n>>> 1 + 1\n3\n"""\n', encoding="utf-8")
    assert portable.run_examples(package) == (3, 1)
    assert "Expected:\n    3\nGot:\n    2" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["import numpy.nothing", "import gradclip.nothing", "import json.nothing", "1 / 0"])
def test_a_module_that_has_to_import_is_an_error(package, line):
    path_of(package, "broken.py").write_text(f"{line}\n", encoding="utf-8")
    with pytest.raises(ZeroDivisionError if line == "1 / 0" else ModuleNotFoundError):
        portable.run_examples(package)


@pytest.mark.parametrize("name", sorted(portable.ACCOUNTING))
def test_what_is_left_out_by_name_has_examples(name):
    module, _, function = name.rpartition(".")
    assert ">>> " in getattr(importlib.import_module(module), function).__doc__


def test_what_gradclip_requires():
    assert {"gradclip", "numpy", "optree", "array_api_compat", "nanobind_backend"} == portable.REQUIRED
