import os

import pytest

from frameworks import WITH_FLOAT32, by_name

# These need eight devices from JAX's start; distributed/test_mesh_axes.py runs them so.
collect_ignore = [] if "device_count=8" in os.environ.get("XLA_FLAGS", "") else ["sharded_jax"]


@pytest.fixture(params=WITH_FLOAT32, ids=by_name)
def framework(request):
    return request.param
