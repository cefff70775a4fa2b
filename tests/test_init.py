"""Importing the library imports no framework, and the names that are imported when used are there."""

import inspect
import pydoc
import re
import subprocess
import sys

import pytest

import gradclip


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
        "gradclip._src.private.audit.self_test",
        "gradclip._src.cli",
        "gradclip._src.advice",
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


def test_every_public_name_is_there_without_any_extra():
    code = (
        "import sys\n"
        "for name in ('torch', 'jax', 'tensorflow', 'matplotlib', 'scipy', 'typer', 'rich', 'safetensors'):\n"
        "    sys.modules[name] = None\n"
        "import gradclip\n"
        "print(all(hasattr(gradclip, name) for name in gradclip.__all__))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_help_starts_with_a_map_and_shows_public_names_alone():
    text = pydoc.plain(pydoc.render_doc(gradclip))
    before, _, after = text.partition("\nCLASSES\n")
    named = set(re.findall(r"\b\w+\b", before.partition("PACKAGE CONTENTS")[0]))
    results = "ClippedFunction ExampleOutputs NativeStatus NormHistory PartialNorm PerExampleInfo PrivateQuantileState"
    results += " SteadyHistory"
    assert {*gradclip.__all__} - named == {
        *results.split(),
        "ClippingError",
        "ClippingWarning",
        "MaxNormSearch",
        "QuantileRule",
        "Sensitivity",
        "SensitivityReport",
        "Spike",
        "SpikeExplanation",
        "SpreadRule",
        "SumLayout",
        "UpdateCheck",
    }
    functions = re.findall(r"^    (\w+)\(", after.partition("\nFUNCTIONS\n")[2], re.MULTILINE)
    assert functions
    assert {*functions} <= {*gradclip.__all__}
    assert "\nDATA\n" not in after


def test_calls_in_the_map_can_be_made_so():
    calls = re.findall(r" {2,}(\w+)\((.*?)\)(?:, (\w+)\((.*?)\))?$", gradclip.__doc__, re.MULTILINE)
    pairs = [pair for one in calls for pair in (one[:2], one[2:]) if pair[0]]
    assert len(pairs) > 20
    for name, arguments in pairs:
        given = list(filter(None, arguments.split(", ")))
        named = dict(one.split("=") for one in given if "=" in one)
        inspect.signature(getattr(gradclip, name)).bind(*(one for one in given if "=" not in one), **named)


def test_dir_has_public_names_alone():
    assert dir(gradclip) == sorted([*gradclip.__all__, "integrations", "typing"])


@pytest.mark.parametrize("name", gradclip.__all__)
def test_help_says_types_by_their_names(name):
    first = pydoc.plain(pydoc.render_doc(getattr(gradclip, name))).partition("\n\n")[2].splitlines()[0]
    assert not re.search(r"(?<!gradclip\.)typing\.|<class|collections\.|~", first)
