"""Install gradclip without its kernels and test it with NumPy alone, on any system: `make portable`.

Each module has to import, unless it needs a package that gradclip does not require. Then the examples in docstrings
run, where they need NumPy only.
"""

import collections
import doctest
import importlib
import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import public_doctests  # noqa: F401  # it lets doctest find what is public
from environments import new_environment, pip_install
from install_table import project

WITHOUT_KERNELS = ("-Cwheel.cmake=false", "-Cwheel.py-api=py3")
REQUIRED = {"gradclip", *(re.match(r"[\w-]+", line)[0].replace("-", "_") for line in project()["dependencies"])}
# Their examples call what needs dp-accounting, without importing it.
ACCOUNTING = {
    "gradclip._src.private.run.accounting.epsilon",
    "gradclip._src.private.run.accounting.noise_multiplier",
    "gradclip._src.private.run.run.PrivateRun",
}
IMPORTED = re.compile(r"^\s*(?:import|from) (\w+)", re.M)


def names_of(package):
    """Return the names of a package's modules, except those that are programs."""
    room = Path(package.__file__).parent
    paths = sorted(path.relative_to(room.parent).with_suffix("") for path in room.rglob("*.py"))
    return [".".join(path.parts).removesuffix(".__init__") for path in paths if path.name != "__main__"]


def imported(name):
    """Return a module, or the name of the package that it lacks. A package that has to be there is an error."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        lacking = (error.name or name).partition(".")[0]
        if lacking in sys.stdlib_module_names or lacking in REQUIRED:
            raise
        return lacking


def examples_of(module):
    """Return the examples in docstrings of a module, except those that import what is not installed."""
    found = [test for test in doctest.DocTestFinder(exclude_empty=True).find(module) if test.examples]
    return [test for test in found if test.name not in ACCOUNTING and not _lacks(test)]


def _lacks(test):
    names = {name for example in test.examples for name in IMPORTED.findall(example.source)}
    return any(importlib.util.find_spec(name) is None for name in names)


def run_examples(package):
    """Import a package's modules and run their examples. Return how many docstrings ran, and how many failed."""
    modules, lacking, runner = [], collections.Counter(), doctest.DocTestRunner()
    for name in names_of(package):
        found = imported(name)
        if isinstance(found, str):
            lacking[found] += 1
        else:
            modules.append(found)
    results = [runner.run(test) for module in modules for test in examples_of(module)]
    print(f"modules imported: {len(modules)}; not without another package: {lacking.total()}")
    print("\n".join(f"  {name}: {count}" for name, count in sorted(lacking.items())))
    return len(results), sum(result.failed > 0 for result in results)


def main():
    """Build, install and test."""
    python = new_environment(".venv-portable")
    pip_install(python, *WITHOUT_KERNELS, ".")
    scripts = Path(__file__).parent
    subprocess.run([python, scripts / "smoke.py", "without-kernels"], check=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-W", "error", Path(__file__).resolve(), "installed"], cwd=folder, check=True)


if __name__ == "__main__":
    if "installed" in sys.argv[1:]:
        ran, failed = run_examples(importlib.import_module("gradclip"))
        print(f"docstrings whose examples ran: {ran}, failed: {failed}")
        sys.exit(failed > 0 or ran == 0)
    else:
        main()
