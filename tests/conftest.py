import gc
import os

# Read when Triton is first imported: its kernels then run on the CPU, in its interpreter. Tests of the kernels switch
# them on; the others test what PyTorch's own operations do.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("GRADCLIP_GPU_KERNELS", "0")

import pytest

from frameworks import WITH_FLOAT32, by_name
from quick import pytest_collection_modifyitems  # noqa: F401

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
