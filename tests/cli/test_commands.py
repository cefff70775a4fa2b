"""The commands: their help imports no framework."""

import subprocess
import sys
from pathlib import Path

from gradclip._src.cli import app as entry


def test_the_help_imports_no_framework():
    code = (
        "import sys; from typer.testing import CliRunner; from gradclip._src.cli.commands import app;"
        "assert CliRunner().invoke(app, ['advise', '--help']).exit_code == 0;"
        "print([name for name in ('jax', 'optax', 'sklearn', 'matplotlib') if name in sys.modules])"
    )
    environment_path = [str(Path(entry.__file__).parents[3])]
    script = f"import sys; sys.path[:0] = {environment_path!r}; {code}"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.strip()) == (0, "[]"), ended.stderr
