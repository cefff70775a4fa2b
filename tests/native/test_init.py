import os
import subprocess
import sys
import zipfile
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

import gradclip
from gradclip._src.native import default_threads, kernels

try:
    from numpy._core._multiarray_umath import __cpu_features__ as processor
except ImportError:  # NumPy 1
    from numpy.core._multiarray_umath import __cpu_features__ as processor

PACKAGE = Path(gradclip.__file__).parent
HAS_AVX2 = all(map(processor.get, ("AVX2", "F16C", "FMA3")))
VARIANTS = ("baseline", *(("avx2",) if HAS_AVX2 else ()), *(("avx512",) if HAS_AVX2 and processor["AVX512F"] else ()))
SAY = (
    "import numpy, gradclip; from gradclip._src.native import kernels;"
    "status = gradclip.native_status();"
    "print(bool(status), status.variant, status.variants, kernels is not None);"
    "print(status.reason);"
    "print(gradclip.clip_by_global_norm(numpy.array([3.0, 4.0]), 10.0)[1])"
)


def say(setting=None, first="", warnings="error"):
    """What a new Python says of the kernels and of the norm of 3 and 4, and its standard error."""
    environment = {name: value for name, value in os.environ.items() if name != "GRADCLIP_NATIVE"}
    if setting is not None:
        environment["GRADCLIP_NATIVE"] = setting
    command = [sys.executable, "-W", warnings, "-c", first + SAY]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def off(variants=()):
    return f"False None {variants} False"


def test_these_tests_run_with_the_kernels():
    assert gradclip.native_status().available
    assert tuple(kernels.variants()) == VARIANTS


@pytest.mark.parametrize("setting", [None, ""])
def test_the_best_variant_is_taken(setting):
    assert say(setting) == ([f"True {VARIANTS[-1]} {VARIANTS} True", "None", "5.0"], "")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_can_be_picked(variant):
    assert say(variant) == ([f"True {variant} {VARIANTS} True", "None", "5.0"], "")


def test_the_kernels_can_be_switched_off():
    reason = "GRADCLIP_NATIVE=0 turns the kernels off. Unset it to use them."
    assert say("0") == ([off(), reason, "5.0"], "")


@pytest.mark.parametrize("setting", ["avx1024", "AVX2", "1"])
def test_a_setting_that_cannot_be_followed_is_no_kernels_and_a_warning(setting):
    said, stderr = say(setting, warnings="default")
    reason = (
        f"GRADCLIP_NATIVE must be one of {', '.join(VARIANTS)} on this processor, or 0 for no kernels, "
        f"got '{setting}'. Unset it to let gradclip choose."
    )
    assert said == [off(VARIANTS), reason, "5.0"]
    assert f"RuntimeWarning: gradclip runs without its compiled kernels. {reason}" in stderr


def test_a_processor_without_avx2_does_not_get_it():
    without = (
        "import sys; from types import SimpleNamespace;"
        "module = SimpleNamespace(variants=lambda: ['baseline'], use_variant=len, __spec__=object());"
        "module.multiplies_polynomials = bool;"
        "module.describe_buffers = lambda arrays: (None, range(len(arrays)));"
        "sys.modules['gradclip._src.native._kernels'] = module;"
    )
    assert say(first=without)[0][0] == "True baseline ('baseline',) True"
    said, _ = say("avx2", first=without, warnings="ignore")
    assert said[0] == off(("baseline",))
    assert said[1].startswith("GRADCLIP_NATIVE must be one of baseline on this processor")


def test_kernels_that_were_not_built():
    said, stderr = say(first="import sys; sys.modules['gradclip._src.native._kernels'] = None;")
    assert (said[0], said[2], stderr) == (off(), "5.0", "")
    assert said[1].startswith("The kernels were not built when gradclip was installed. To build them, install a C++")
    assert "GRADCLIP_REQUIRE_NATIVE=1" in said[1]


def test_kernels_in_a_zip_file_cannot_be_loaded(tmp_path):
    path = tmp_path / "gradclip.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for file in PACKAGE.rglob("*.py"):
            archive.write(file, file.relative_to(PACKAGE.parent))
    # The finder of an editable installation comes before all paths.
    paths_only = "sys.meta_path = [one for one in sys.meta_path if 'Redirecting' not in type(one).__name__];"
    said, stderr = say(first=f"import sys; {paths_only} sys.path.insert(0, {str(path)!r});")
    assert (said[0], said[2], stderr) == (off(), "5.0", "")
    assert said[1].startswith(
        f"gradclip was imported from a zip file, {path}. Python cannot load the kernels from there"
    )
    assert said[1].endswith("To use them, unpack the file, or install gradclip with pip.")


def test_kernels_that_do_not_load():
    said, stderr = say(first="import sys; sys.modules['nanobind_backend'] = None;")
    assert (said[0], said[2], stderr) == (off(), "5.0", "")
    assert said[1].startswith("The kernels failed to load: ")
    assert "nanobind_backend" in said[1]


def test_the_status_cannot_be_changed_and_reads_as_a_sentence():
    status = gradclip.NativeStatus(False, None, (), "Switched off.")
    assert str(status) == "not available: Switched off."
    assert str(gradclip.NativeStatus(True, "avx2", ("baseline", "avx2"), None)) == "avx2"
    with pytest.raises(FrozenInstanceError):
        status.available = True


@pytest.mark.parametrize(
    ("asked", "expected"), [("3", 3), (" 5 ", 5), ("4,2", 4), ("2 , 1", 2), ("007", 7), ("1" * 5000, 9999)]
)
def test_as_many_threads_as_openmp_would_take(monkeypatch, asked, expected):
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert default_threads.__wrapped__() == expected


@pytest.mark.parametrize("asked", ["", "0", "00", "-1", "many", "1.5", ",2", "\u0663"])
def test_what_is_no_number_of_threads_does_not_count(monkeypatch, asked):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    usual = default_threads.__wrapped__()
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert default_threads.__wrapped__() == usual
