"""Install an sdist without a working compiler. It must install, or fail with GRADCLIP_REQUIRE_NATIVE=1."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

SMOKE = Path(__file__).with_name("smoke.py")
BROKEN = shutil.which("false")


def install(sdist, require):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-cache-dir"]
    environment = os.environ | {"CC": BROKEN, "CXX": BROKEN, "GRADCLIP_REQUIRE_NATIVE": require}
    command = [*pip, "--force-reinstall", "--no-deps", sdist]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def check_contents(sdist):
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    if strays := {name for name in files if name.startswith((".ci", "build", ".venv")) or name.endswith(".so")}:
        sys.exit(f"the sdist must not hold {sorted(strays)}")
    root = SMOKE.parent.parent
    listed = subprocess.run(
        ["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    left_out = tuple(settings["tool"]["scikit-build"]["sdist"]["exclude"])
    if lacking := {name for name in listed if not name.startswith(left_out)} - files:
        sys.exit(f"the sdist lacks files of the repository: {sorted(lacking)}")


if __name__ == "__main__":
    sdist = sys.argv[1]
    check_contents(sdist)
    required = install(sdist, "1")
    if required.returncode == 0 or BROKEN not in required.stdout + required.stderr:
        sys.exit(f"expected a failure that names the compiler {BROKEN}, got {required.stdout}{required.stderr}")
    print("without a compiler and with GRADCLIP_REQUIRE_NATIVE=1, the sdist does not install and says why")
    optional = install(sdist, "")
    if optional.returncode != 0:
        sys.exit(f"expected to install without the kernels, got {optional.stdout}{optional.stderr}")
    sys.exit(subprocess.run([sys.executable, SMOKE, "without-kernels"], check=False).returncode)
