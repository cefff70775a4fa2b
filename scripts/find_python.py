"""Print the path of a Python of the given version that starts, or an empty line."""

import glob
import os
import shutil
import subprocess
import sys


def candidates(version):
    yield os.environ.get(f"PYTHON{version.replace('.', '')}")
    yield shutil.which(f"python{version}")
    yield from sorted(glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin/python{version}")), reverse=True)


def starts(python, version):
    code = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.returncode == 0 and done.stdout.strip() == version


if __name__ == "__main__":
    wanted = sys.argv[1]
    print(next((p for p in candidates(wanted) if p and starts(p, wanted)), ""))
