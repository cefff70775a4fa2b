"""Make environments for scripts that build or install gradclip, and run the tests that need no framework."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTEST = [
    *("-W", "error", "-m", "pytest", "--import-mode=importlib", "-c", os.devnull, "--rootdir", "."),
    *("--confcutdir", "tests/native", "-p", "no:cacheprovider", "tests/native"),
]


def pip_install(python, *arguments, **environment):
    install = ["-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-compile"]
    command = [str(python), *install, *map(str, arguments)]
    subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=True)


def new_environment(folder, *packages):
    """Create a fresh virtual environment and return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(ROOT / folder)], check=True)
    python = ROOT / folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if packages:
        pip_install(python, *packages)
    return python


def run_native_tests(python, *options, **environment):
    """Run tests/native, which needs NumPy but no framework."""
    settings = os.environ | {"PYTHONPATH": "tests/support"} | environment
    subprocess.run([str(python), *PYTEST, *options], cwd=ROOT, env=settings, check=True)
