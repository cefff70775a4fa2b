"""Collect the wheels that a bare machine with a GPU lacks, for `make gpu`: `gpu_wheels.py [FOLDER] [--this-python]`.

They are for Python 3.12 on Linux x86-64, or for this Python. Such a machine has PyTorch, JAX and what they come with.
"""

import argparse
import platform
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 40_000_000
# Of what the wheels require, this is on the machine.
THERE = {"numpy", "opt-einsum", "scipy", "torch", "typing-extensions"}
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
# What scikit-build-core requires. The machine's own may be too old for it.
WITH_THE_BUILD = ("packaging>=23.2", "pathspec>=0.12")


def name_of(requirement):
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def wanted():
    """Return the requirements of gradclip and its build that the machine lacks, and the release of Opacus in tests."""
    text = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    project = text["project"]
    lines = [*project["dependencies"], *text["build-system"]["requires"], *WITH_THE_BUILD]
    opacus = [line for line in project["optional-dependencies"]["test"] if name_of(line) == "opacus"]
    return [line.partition(";")[0].strip() for line in [*lines, *opacus] if name_of(line) not in THERE]


def download(folder, version):
    settings = [f"--platform={name}_x86_64" for name in PLATFORMS]
    settings += ["--only-binary=:all:", "--no-deps", "--implementation=cp", f"--python-version={version}"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download", *settings]
    subprocess.run([*command, "--dest", str(folder), *wanted()], check=True)


def lacking(wheels):
    """Return what wheels require that is neither among them nor on the machine."""
    required = set()
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as inside:
            metadata = next(name for name in inside.namelist() if name.endswith(".dist-info/METADATA"))
            lines = re.findall(r"^Requires-Dist: (.+)$", inside.read(metadata).decode(), re.M)
        required |= {name_of(line) for line in lines if not re.search("extra ==|python_version <", line)}
    return sorted(required - THERE - {name_of(wheel.name.partition("-")[0]) for wheel in wheels})


def checked(wheels, limit=LIMIT):
    """Return the bytes of the wheels; stop if they are too many or not all."""
    total = sum(wheel.stat().st_size for wheel in wheels)
    if total > limit:
        sys.exit(f"The wheels take {total / 1e6:.1f} MB, and at most {limit / 1e6:.0f} MB are allowed. Collect fewer.")
    if missing := lacking(wheels):
        sys.exit(f"Wheels require {', '.join(missing)}. Add them to what scripts/gpu_wheels.py collects, or to THERE.")
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "gpu-wheels")
    parser.add_argument("--this-python", action="store_true")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for old in given.folder.glob("*.whl"):  # of two releases in the folder, neither would be installed
        old.unlink()
    download(given.folder, platform.python_version().rpartition(".")[0] if given.this_python else "3.12")
    wheels = sorted(given.folder.glob("*.whl"))
    total = checked(wheels)
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 1e6:5.2f} MB  {wheel.name}")
    print(f"{total / 1e6:5.2f} MB in {given.folder}")


if __name__ == "__main__":
    main()
