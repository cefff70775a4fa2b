"""Releases that are too old: nothing breaks until one of their arrays arrives, and then the error says what to do."""

import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from fresh_process import run
from gradclip._src.backends import imported
from gradclip._src.backends.imported import needed_for

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]

# A module that has little more than a version, as an old release may lack anything else.
OLD = """
class Array:
    pass
Tensor = Variable = Array
"""
CALLS = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
{imports}

def of_numpy():
    clipped, norm = gradclip.clip_by_global_norm({{"w": np.array([3.0, 4.0]), "b": None}}, 1.0)
    assert clipped["w"].round(4).tolist() == [0.6, 0.8] and norm == 5.0
    summed, info = gradclip.per_example_clip(np.array([[3.0, 4.0], [0.0, 0.5]]), 1.0)
    assert summed.round(4).tolist() == [0.6, 1.3]
    try:
        gradclip.global_norm([np.ones(2), object()])
    except TypeError as error:
        assert "must be an array of" in str(error)

of_numpy()
for call in (lambda x: gradclip.global_norm([x]), lambda x: gradclip.per_example_clip({{"w": x}}, 1.0)):
    try:
        call({name}.Array())
    except ImportError as error:
        print(error)
of_numpy()
assert not [m for m in sys.modules if m.startswith(("gradclip._src.backends.{name}.", "{name}."))]
"""


def old(folder, name, version):
    (folder / f"{name}.py").write_text(f'__version__ = "{version}"\n{OLD}')


@pytest.mark.parametrize(
    ("imports", "name", "version", "wanted"),
    [
        ("gradclip, jax", "jax", "0.8.3", "0.9"),
        ("jax, gradclip", "jax", "0.6.2", "0.9"),
        ("torch, gradclip", "torch", "2.5.1+cpu", "2.6"),
        ("gradclip, tensorflow", "tensorflow", "2.9.0", "2.21"),
    ],
)
def test_old_releases_are_left_alone(tmp_path, imports, name, version, wanted):
    old(tmp_path, name, version)
    printed = run(CALLS.format(name=name, imports=f"import {imports}"), tmp_path).splitlines()
    expected = f"gradclip needs {name} {wanted} or newer, but {name} {version} is imported. Run: pip install"
    assert [line[: len(expected)] for line in printed] == [expected] * 2


INTEGRATIONS = """
import sys
sys.path.insert(0, sys.argv[1])
try:
    import gradclip.integrations.{integration}
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("integration", "name", "version"),
    [("optax", "jax", "0.7.2"), ("torch", "torch", "1.13.1"), ("tensorflow", "tensorflow", "2.20.0")],
)
def test_integrations_refuse_old_releases(tmp_path, integration, name, version):
    old(tmp_path, name, version)
    (tmp_path / "optax.py").write_text("")
    assert f"but {name} {version} is imported" in run(INTEGRATIONS.format(integration=integration), tmp_path)


def test_an_integration_that_loads_with_an_old_release_is_refused(tmp_path):
    old(tmp_path, "keras", "3.14.0")
    (tmp_path / "keras.py").write_text((tmp_path / "keras.py").read_text() + "ops = None\n")
    assert "gradclip needs keras 3.15 or newer" in run(INTEGRATIONS.format(integration="keras"), tmp_path)


def test_the_oldest_releases_are_those_of_the_project():
    lines = [line for extra in PROJECT["optional-dependencies"].values() for line in extra]
    stated = {match[1]: match[2] for line in lines if (match := re.match(r"([a-z]+)>=([\d.]+)$", line))}
    for name, oldest in imported.OLDEST.items():
        assert stated[name] == ".".join(map(str, oldest))


@pytest.mark.parametrize(
    ("version", "recent"),
    [
        *((version, True) for version in ("0.9", "0.9.0", "0.10.2", "1.0.0rc1", "0.9.0.dev1+abc", "", "unknown")),
        *((version, False) for version in ("0.8.9", "0.8", "0.0.1.dev2")),
    ],
)
def test_versions_are_compared_as_numbers(monkeypatch, version, recent):
    module = ModuleType("jax")
    module.__version__ = version
    monkeypatch.setitem(sys.modules, "jax", module)
    assert imported.is_recent("jax") is recent


def test_libraries_without_an_oldest_release_are_recent():
    assert imported.is_recent("numpy")
    assert imported.needed_instead("optax", "0.0.1") is None
    imported.check_release("")


def test_a_missing_module_of_our_own_is_no_missing_library():
    with pytest.raises(ModuleNotFoundError, match="No module named 'gradclip\\.nowhere'"), needed_for("torch"):
        import gradclip.nowhere  # noqa: F401
