import gc
import os

# Read when Triton is first imported: its kernels then run on the CPU, in its interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest  # noqa: E402

from frameworks import WITH_FLOAT32, by_name  # noqa: E402
from quick import pytest_collection_modifyitems  # noqa: E402, F401

# Those of Keras need a backend, which integrations/test_keras.py chooses, and the others need eight devices from JAX's
# start, which distributed/test_mesh_axes.py gives them.
collect_ignore = ["keras_backends"]
if "device_count=8" not in os.environ.get("XLA_FLAGS", ""):
    collect_ignore.append("sharded_jax")


def pytest_collection_finish():
    """Let garbage collections pass over what was there before the tests: frameworks, and thousands of tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=WITH_FLOAT32, ids=by_name)
def framework(request):
    return request.param
