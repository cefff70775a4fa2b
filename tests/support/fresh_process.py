"""Code that runs in a process of its own, which has imported and traced nothing."""

import os
import subprocess
import sys
import textwrap


def run(code, folder, **settings):
    """Return what the code prints; it is given the folder, and these variables of the environment."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), str(folder)],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
