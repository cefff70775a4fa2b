"""Errors of kernels, which come late, are those of the test that launched them. The most telling files come first."""

from pathlib import Path

import pytest

from on_gpu import ON

FIRST = (
    "test_cuda",
    "test_bound",
    "test_memory",
    "test_policies",
    "test_functional",
    "test_waiting",
    "test_streams",
    "test_graphs",
    "test_adaptive",
    "test_scaler",
    "test_steps",
    "test_examples",
    "test_jax",
    "test_sharded",
    "test_compiled",
)


def pytest_collection_modifyitems(items):
    places = {Path(__file__).with_name(f"{name}.py"): place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path, -1))  # those of other folders keep their places


@pytest.fixture(autouse=True)
def finished():
    yield
    ON.usual()
    ON.synchronize()
