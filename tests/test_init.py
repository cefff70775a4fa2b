"""Importing the library imports no framework, and the names that are imported when used are there."""

import subprocess
import sys


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
