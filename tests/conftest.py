import gc
import os

# Read when Triton is first imported: its kernels then run on the CPU, in its interpreter. Tests of the kernels switch
# them on; the others test what PyTorch's own operations do.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("GRADCLIP_GPU_KERNELS", "0")

import pytest

import left_behind
from quick import pytest_collection_modifyitems  # noqa: F401

# Those of Keras need a backend, which integrations/test_keras.py chooses, and the others need eight devices from JAX's
# start, which distributed/test_processes_mesh_axes.py gives them.
collect_ignore = ["keras_backends"]
if "device_count=8" not in os.environ.get("XLA_FLAGS", ""):
    collect_ignore.append("sharded_jax")


def pytest_collectstart(collector):
    """Import PyTorch's compiler before TensorFlow: Triton's library, which it loads, aborts after TensorFlow's."""
    if isinstance(collector, pytest.Module) and collector.path.parent.name != "repository":
        import frameworks  # noqa: F401


def pytest_collection_finish():
    _pass_over_what_is_there()


def pytest_runtest_teardown(item, nextitem):
    if nextitem is None or nextitem.path != item.path:
        _pass_over_what_is_there()


def _pass_over_what_is_there():
    """Let garbage collections look at what is new only, not at frameworks and what other files' tests have compiled."""
    gc.collect()
    gc.freeze()


def pytest_generate_tests(metafunc):
    """Give `framework` to tests that choose none themselves. Other tests need not wait for their imports."""
    if "framework" in metafunc.fixturenames and not any(
        "framework" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")
    ):
        from frameworks import WITH_FLOAT32, by_name

        metafunc.parametrize("framework", WITH_FLOAT32, ids=by_name)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    before = left_behind.state()
    yield
    assert left_behind.changed(before, left_behind.state()) == []
