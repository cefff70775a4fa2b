"""gradclip can be imported again, before or after `jax.export`, as notebooks that reload modules do."""

import subprocess
import sys

import pytest

AGAIN = "for name in [name for name in sys.modules if name.split('.')[0] == 'gradclip']: del sys.modules[name]\n"


@pytest.mark.parametrize(
    "program",
    [
        f"import sys, gradclip\n{AGAIN}import gradclip\nimport jax.export",
        f"import sys, jax.export, gradclip\n{AGAIN}import gradclip",
    ],
)
def test_import_again(program):
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
