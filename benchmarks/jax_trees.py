"""Time clipping of a tree of JAX arrays, jitted, jitted with donation, or eager, compared with replaced libraries."""

import brainstate
import jax
import jax_privacy.clipping
import numpy as np
import optax

from gradclip.integrations.optax import clip_by_global_norm

HOW = ("jitted", "donated", "eager")
FUNCTIONS = {
    "gradclip (optax name)": lambda tree, c: clip_by_global_norm(c).update(tree, optax.EmptyState())[0],
    "optax.clip_by_global_norm": lambda tree, c: optax.clip_by_global_norm(c).update(tree, optax.EmptyState())[0],
    "jax_privacy clip_pytree": lambda tree, c: jax_privacy.clipping.clip_pytree(tree, clip_norm=c)[0],
    "brainstate clip_grad_norm": lambda tree, c: brainstate.nn.clip_grad_norm(tree, c),
}


def jax_contenders(shapes, how, case):
    """Return calls on the same gradients. Donated calls get a fresh copy each time, which is not timed."""
    tree = [jax.numpy.asarray(np.random.default_rng(0).standard_normal(s, np.float32)) for s in shapes]
    threshold = 1e9 if case == "not clipped" else 100.0
    given = [tree]

    def copied():
        given[0] = jax.block_until_ready(jax.tree.map(jax.numpy.copy, tree))

    def contender(function):
        call = function if how == "eager" else jax.jit(function, donate_argnums=(0,) if how == "donated" else ())

        def timed():
            return jax.block_until_ready(call(given[0], threshold))

        return (timed, copied) if how == "donated" else timed

    return {name: contender(function) for name, function in FUNCTIONS.items()}
