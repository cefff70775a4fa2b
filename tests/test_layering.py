"""Who may import whom, and that importing the library imports no framework."""

import ast
import subprocess
import sys
from pathlib import Path

import gradclip

ROOT = Path(gradclip.__file__).parent
# The files of `backends` that everybody may import. Python runs the folder's `__init__` before them.
LOW = {"__init__", "formats", "arrays", "held", "protocols", "when_imported", "framework", "entries", "registry"}
LAYERS = [
    {"registry"},
    {"tree", "arithmetic"},
    {"native"},
    {"versions"},
    {"backends", "scopes"},
    {"arguments", "norms", "exact", "grid", "hostile", "rounding"},
    {"coefficient", "accumulators", "quantities"},
    {"policy", "members", "layers", "promise"},
    {"derivative", "agreement", "batch_shapes", "call_arguments", "check_arguments", "per_example_settings"},
    {"sensitivity", "shardings", "holders"},
    {"mesh_axes", "replicas", "decision", "seen"},
    {"process_groups", "traced_layers"},
    {"processes", "groups"},
    {"clip", "norm_at_most", "streamed"},
    {"gradients"},
    {"inplace", "per_example"},
    {"layerwise"},
    {"clipped"},
    {"transforms", "kinks"},
    {"sensitivity_check"},
    {"integrations"},
    {"demo"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def imported_rooms(path):
    tree = ast.parse(path.read_text())
    for node in run_when_imported(tree) if room_of(path) == "registry" else ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gradclip":
            first, *rest = node.module.split(".")[1:] or [alias.name for alias in node.names]
            yield "registry" if first == "backends" and rest and rest[0] in LOW else first
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("gradclip."))


def run_when_imported(node):
    """Yield what runs at import: no functions, in which frameworks are loaded later, and nothing for types alone."""
    yield node
    for child in ast.iter_child_nodes(node):
        for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not for_types and not isinstance(child, ast.FunctionDef | ast.Lambda):
            yield from run_when_imported(child)


def room_of(path):
    first, *rest = path.relative_to(ROOT).with_suffix("").parts
    return "registry" if first == "backends" and rest[0] in LOW else first


def violations(rank):
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        room = room_of(path)
        for other in imported_rooms(path):
            if room in rank and other in rank and other != room and rank[other] >= rank[room]:
                found.append(f"{room} imports {other}")
    return found


def test_every_file_has_a_layer():
    rooms = {room_of(path) for path in ROOT.rglob("*.py")} - {"__init__"}
    assert rooms <= set(RANK)


def test_imports_go_down_only():
    assert violations(RANK) == []


def test_the_check_sees_a_violation():
    assert "clip imports decision" in violations({**RANK, "decision": 99})


def test_the_check_sees_what_the_registry_imports(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "LOW", LOW | {"host"})
    assert violations(RANK) == ["registry imports native"]


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
        "gradclip.sensitivity_check",
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
