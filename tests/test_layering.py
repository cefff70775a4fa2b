"""Who may import whom, and that importing the library imports no framework."""

import subprocess
import sys

import pytest

import structure

# Rooms of one line do not import each other, and none imports a room of a line below it.
LAYERS = [
    {"floor", "native"},
    {"backends"},
    {"core", "arguments", "parameters", "versions"},
    {"distributed"},
    {"layers"},
    {"clip", "inplace", "norm_at_most", "per_example"},
    {"integrations"},
    {"cli"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
MOST_IN_A_CHAIN = 11


def violations(rank):
    """Return which room imports one that is not below it."""
    pairs = structure.imports_of_rooms()
    return sorted(f"{room} imports {other}" for room, other in pairs if rank[other] >= rank[room])


def test_every_file_has_a_layer():
    assert structure.rooms() == set(RANK)


def test_imports_go_down_only():
    assert violations(RANK) == []


def test_the_check_sees_a_violation():
    assert "clip imports core" in violations({**RANK, "core": 99})


def test_the_check_sees_what_the_floor_imports(monkeypatch):
    monkeypatch.setattr(structure, "FLOOR", structure.FLOOR | {"backends.conversions"})
    assert violations(RANK) == ["floor imports backends"]


def test_there_are_eight_layers_and_no_long_chains():
    assert len(LAYERS) == 8
    assert len(structure.longest_chain(structure.graph())) <= MOST_IN_A_CHAIN


def test_chains_are_counted_in_what_imports_run():
    assert structure.longest_chain({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == ["a", "b", "c"]
    with pytest.raises(RecursionError):
        structure.longest_chain({"a": {"b"}, "b": {"a"}})


def test_importing_gradclip_imports_no_framework():
    others = ("torch", "jax", "tensorflow", "matplotlib", "rich")
    code = f"import sys, gradclip; print([m for m in {others} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_using_numpy_imports_no_framework():
    code = (
        "import sys, numpy, gradclip; gradclip.clip_by_global_norm({'w': numpy.ones(3)}, 1.0);"
        "print([m for m in ('torch', 'jax') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_gradclip_imports_nothing_that_most_programs_do_without():
    others = (
        "array_api_compat.numpy",
        "numpy.f2py",
        "numpy.random",
        "numpy.testing",
        "gradclip.per_example.self_test",
        "gradclip.cli",
    )
    code = "import sys, numpy, optree; before = set(sys.modules); import gradclip; "
    code += f"print(sorted(set({others}) & sys.modules.keys() - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_is_imported_when_used_is_there():
    code = (
        "import gradclip; report = gradclip.SensitivityReport; from gradclip import check_sensitivity;"
        "print(callable(gradclip.check_sensitivity), {*gradclip.__all__} <= {*dir(gradclip)}, hasattr(gradclip, 'x'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True True False"
