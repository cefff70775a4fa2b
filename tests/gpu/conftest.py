"""The order of these tests, what of the frameworks' own warnings is an error, and to which test late errors belong."""

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
    """Run the most telling files first. Pass over warnings of frameworks, which differ from machine to machine."""
    places = {Path(__file__).with_name(f"{name}.py"): place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path, -1))  # those of other folders keep their places
    for item in items:
        if item.path in places:
            for name in ("torch", "jax", "triton"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore:::{name}"))


@pytest.fixture(autouse=True, scope="session")
def standing_in():
    with ON.standing_in():
        yield


@pytest.fixture(autouse=True)
def finished():
    """Wait after each test: errors of kernels come late, and would be told of a later one."""
    yield
    ON.synchronize()
