import os

import pytest

import quick
from frameworks import WITH_FLOAT32, by_name

# Those of Keras need a backend, which integrations/test_keras.py chooses, and the others need eight devices from JAX's
# start, which distributed/test_mesh_axes.py gives them.
collect_ignore = ["keras_backends"]
if "device_count=8" not in os.environ.get("XLA_FLAGS", ""):
    collect_ignore.append("sharded_jax")

COLLECTED = pytest.StashKey[list[pytest.Item]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark the tests that `make test` chooses by `-m quick`."""
    config.stash[COLLECTED] = list(items)
    for item in quick.chosen(items):
        item.add_marker("quick")


@pytest.fixture(params=WITH_FLOAT32, ids=by_name)
def framework(request):
    return request.param
