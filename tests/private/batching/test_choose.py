import subprocess
import sys

import pytest

from gradclip._src.backends.entries import ENTRIES
from gradclip._src.private.batching.choose import batching_of


@pytest.mark.parametrize(
    "framework", [entry for entry in ENTRIES if entry.has_derivatives], ids=lambda entry: entry.name
)
def test_each_framework_with_derivatives_has_two_kinds(framework):
    at_once, in_a_loop = (type(batching_of(framework, method)).__name__ for method in ("materialize", "loop"))
    assert at_once.endswith("Batching")
    assert in_a_loop.endswith("Loop")


def test_frameworks_are_imported_when_they_are_asked_for():
    code = "import sys, gradclip._src.private.batching.choose; print({*sys.modules} & {'jax', 'tensorflow', 'torch'})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
