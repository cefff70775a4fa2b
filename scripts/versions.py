"""Run the tests with the oldest and the newest supported releases: `python versions.py oldest newest too_old`.

`too_old` checks that a JAX before the oldest release is left alone.

pyproject.toml states the oldest releases. JAX needs NumPy 2, so the oldest NumPy and the oldest JAX are tested in
separate environments. PyTorch is 2.13.0 unless TORCH names a different release, which may take several GB.
"""

import os
import re
import subprocess
import sys
import tomllib

from environments import ROOT, new_environment, pip_install, run_native_tests

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TORCH = f"torch=={os.environ.get('TORCH') or '2.13.0'}"
TESTS = [
    *("functional", "test_tree.py", "core/test_norms*", "core/test_nonfinite*", "inplace", "backends"),
    *("private/sums", "private/functions", "private/batching"),
]


def lowest(*names):
    """Return requirements for the oldest supported release of each library."""
    lines = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]
    bounds = dict(re.match(r"([a-z-]+)(?:>=([\d.]+))?", line).groups() for line in reversed(lines))
    return [f"{name}=={bounds[name]}" for name in names]


def oldest():
    python = new_environment(".venv-versions", "pytest", "ml_dtypes", *lowest(*CORE))
    install(python)
    run_native_tests(python, "-q")
    python = new_environment(".venv-versions", TORCH)
    pip_install(python, "pytest", "ml_dtypes", *lowest("jax", "optax", "optree", "array-api-compat"))
    install(python)
    run_tests(python)


def newest():
    """Run what `make test` runs, with the newest releases of everything but PyTorch."""
    python = new_environment(".venv-versions", TORCH)
    tested = PROJECT["optional-dependencies"]["test"]
    others = [re.sub("^([^;=]+)==[^;]+", r"\1", line) for line in tested if not line.startswith(("gradclip", "torch"))]
    pip_install(python, "--upgrade", TORCH, *others, *CORE, ".[cli,plot,private]", GRADCLIP_REQUIRE_NATIVE="1")
    subprocess.run([str(python), "-m", "pip", "list"], check=True)
    run_native_tests(python, "-q")
    workers = ["--numprocesses", "2", "--dist", "worksteal"]
    run_pytest(python, *workers, "-m", "quick and not gpu", "tests", *IGNORED)


def too_old():
    for release in TOO_OLD:
        python = new_environment(".venv-versions", *CORE, release)
        install(python)
        subprocess.run([str(python), "-W", "error", str(ROOT / "scripts" / "smoke.py"), "too-old-jax"], check=True)


TOO_OLD = ("jax==0.6.2", "jax==0.7.2")
# Tests with environments of their own, and one of a table of the releases that we test with.
IGNORED = [f"--ignore=tests/{name}" for name in ("parity/lucid", "parity/test_parity_table.py", "site", "trainers")]
CORE = ("numpy", "optree", "array-api-compat", "nanobind-backend")


def install(python):
    pip_install(python, "--no-cache-dir", ".", GRADCLIP_REQUIRE_NATIVE="1")
    subprocess.run([str(python), "-m", "pip", "list"], check=True)


def run_tests(python):
    """Run the tests that need only PyTorch and JAX."""
    run_pytest(python, *(str(path) for name in TESTS for path in sorted((ROOT / "tests").glob(name))))


def run_pytest(python, *arguments):
    """Run tests. Warnings of other releases than ours are not errors."""
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", "-W", "default"]
    subprocess.run([str(python), "-m", "pytest", *options, *arguments], cwd=ROOT, check=True)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"== {name}", flush=True)
        {"oldest": oldest, "newest": newest, "too_old": too_old}[name]()
