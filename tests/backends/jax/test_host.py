"""Concrete JAX arrays on the CPU, as host memory."""

import jax.numpy as jnp
import numpy as np

from gradclip._src.backends.jax.host import JaxHost
from gradclip._src.core.coefficient import coefficient
from gradclip._src.core.layouts import TREE
from gradclip._src.core.norms import Order


def test_jax_takes_the_memory_of_eager_results_over():
    x = jnp.arange(1.0, 100_001.0)
    backend = JaxHost()
    norm = backend.norms(backend.enter([x]), Order(2.0))
    (result,) = backend.scale(backend.enter([x]), coefficient(backend, norm, np.float64(1.0), split=False), TREE)
    assert backend.leave(result, x).unsafe_buffer_pointer() == result.data.ctypes.data
