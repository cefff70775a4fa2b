import os

import pytest

import eight_devices
from quick import pytest_collection_modifyitems  # noqa: F401

BACKEND = os.environ["KERAS_BACKEND"]
collect_ignore = [f"test_{other}.py" for other in ("jax", "torch", "tensorflow") if other != BACKEND]


def pytest_configure():
    """Give TensorFlow two devices and JAX eight, which they take from the CPU only before their first operation."""
    if BACKEND == "jax":
        os.environ.update(eight_devices.ENVIRONMENT)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


@pytest.fixture(autouse=True)
def _seeded():
    import keras

    keras.utils.set_random_seed(0)
