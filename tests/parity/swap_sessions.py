"""Several runs of pytest with the plugin beside this module, one after the other in one process.

Reads from standard input a list of [settings, options]: what the environment tells the plugin, and what pytest is told.
"""

import json
import os
import sys

import jax
import pytest

if __name__ == "__main__":
    for settings, options in json.load(sys.stdin):
        if settings["GRADCLIP_SWAP"] != os.environ.get("GRADCLIP_SWAP"):
            jax.clear_caches()  # what was traced calls the functions that were in the place of the library's own
        os.environ.update(settings)
        code = pytest.main(options)
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            sys.exit(code)
