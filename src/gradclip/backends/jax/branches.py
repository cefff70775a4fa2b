"""A choice between two computations, of which only the needed one runs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def either(flags: jax.Array, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """Return `then()` if any flag is set, else `otherwise()`. Both return the same types."""
    flag = jnp.any(flags)
    if isinstance(flag, jax.core.Tracer):
        return lax.cond(flag, then, otherwise)
    # Outside traced code, `lax.cond` would compile again at every call, and JAX would keep every program.
    return then() if flag else otherwise()
