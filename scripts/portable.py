"""Install gradclip without its kernels and test it with NumPy alone, on any system: `make portable`.

Examples in docstrings are the tests, where they need no other package than NumPy.
"""

import subprocess
import tempfile
from pathlib import Path

from environments import ROOT, new_environment, pip_install

WITHOUT_KERNELS = ("-Cwheel.cmake=false", "-Cwheel.py-api=py3")
# Their examples need a framework, OpenDP or dp-accounting.
NEED_MORE = ("*explained.py", "*fused*", "*per_example*transforms.py", "*private*")


def main():
    """Build, install and test."""
    python = new_environment(".venv-portable")
    pip_install(python, *WITHOUT_KERNELS, ".")
    subprocess.run([python, ROOT / "scripts" / "smoke.py", "without-kernels"], check=True)
    pip_install(python, "pytest>=8.4")
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "pytest.ini"
        settings.write_text("[pytest]\n", encoding="utf-8")
        options = ["-q", "-c", settings, "-p", "no:cacheprovider"]
        options += ["--doctest-modules", "--doctest-ignore-import-errors"]
        left_out = [f"--ignore-glob={pattern}" for pattern in NEED_MORE]
        subprocess.run([python, "-m", "pytest", *options, *left_out, "--pyargs", "gradclip"], cwd=folder, check=True)


if __name__ == "__main__":
    main()
