"""In place of the one above, which imports the other frameworks."""

import jax

from quick import pytest_collection_modifyitems  # noqa: F401

# With fewer processors than devices, programs that run at the same time may each hold threads that the others wait for.
jax.config.update("jax_cpu_enable_async_dispatch", False)
