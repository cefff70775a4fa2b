"""Compiled calls with thresholds from zero to infinity: finite results, in exact arithmetic within the bound.

Also sparse gradients whose rows come in several pieces.
"""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf
from jax.experimental import sparse

import gradclip
from attack.shapes import leaf
from rational import at_most

DTYPES = ("float16", "bfloat16", "float32", "float64")
ORDERS = (2, 2, 1, 3, math.inf, -math.inf)
THRESHOLDS = (0.0, 5e-324, 1e-310, 2.0**-1000, 1e-45, 1e-40, 2.0**-120, 1e-9, 1.0, 1e30, 1e300, math.inf)
WAYS = ("jax", "tensorflow", "xla")

# Each clips the rows of a matrix, every row to the threshold.
CALLS = {
    "tree": lambda x, c, ord: [gradclip.clip_by_global_norm(x[i], c, ord=ord)[0] for i in range(x.shape[0])],
    "layers": lambda x, c, ord: gradclip.clip_by_layer_norm([x[i] for i in range(x.shape[0])], c, ord=ord)[0],
    "units": lambda x, c, ord: gradclip.clip_by_unit_norm(x, c, unit_axis=0, ord=ord)[0],
    "adaptive": lambda x, c, ord: gradclip.adaptive_grad_clip(x, x * 0, clipping=1.0, eps=c, unit_axis=0, ord=ord)[0],
    "examples": lambda x, c, ord: [gradclip.per_example_clip(x[i : i + 1], c)[0] for i in range(x.shape[0])],
    "value": lambda x, c, ord: gradclip.clip_by_value(x, c),
}


def attack(rng):
    if rng.integers(4) == 0:
        attack_pieces(rng)
        return
    name, way, dtype = (str(rng.choice(list(some))) for some in (CALLS, WAYS, DTYPES))
    # Sums over examples have the 2-norm; bounds on values are those of the largest.
    ord = {"examples": 2, "value": math.inf}.get(name) or ORDERS[rng.integers(len(ORDERS))]
    x = leaf(rng, dtype, 12).reshape(3, 4)
    c, known = THRESHOLDS[rng.integers(len(THRESHOLDS))], bool(rng.integers(2))
    said = f"{name}, {way}, {dtype}, ord={ord}, threshold {c!r}, {'known' if known else 'traced'}, {x.tolist()}"
    result = compiled(way, lambda x, c: CALLS[name](x, c, ord), x, c, known=known)
    # A sum over examples is rounded to nearest.
    limit = c * (1 + 2.0**-22) + 2.0**-149 if name == "examples" and c else c
    for row in np.asarray([np.asarray(row) for row in result]).astype(float):
        assert np.isfinite(row).all(), f"not finite: {row} of {said}"
        assert c == math.inf or at_most([row], ord, limit), f"above the threshold: {row} of {said}"


def compiled(way, call, x, c, *, known):
    """Return what a compiled call gives, with a threshold that is known while it is compiled, or not."""
    if way == "jax":
        with jax.enable_x64(True):
            given = jnp.asarray(x)
            return jax.jit(lambda x: call(x, c))(given) if known else jax.jit(call)(given, c)
    xla = way == "xla"
    if known:
        return tf.function(lambda x: call(x, c), jit_compile=xla)(tf.constant(x))
    return tf.function(call, jit_compile=xla)(tf.constant(x), tf.constant(c, tf.float64))


def attack_pieces(rng):
    way, dtype = str(rng.choice(list(WAYS))), str(rng.choice(list(DTYPES)))
    count = int(rng.integers(1, 9))
    # Pieces of one row have one sign: a small difference of large pieces is rounded.
    values = np.abs(leaf(rng, dtype, count)) / np.asarray(16, leaf(rng, dtype, 1).dtype)
    rows = rng.integers(0, 4, count)
    sums = [sum(map(Fraction, values[rows == row].astype(float).tolist()), Fraction(0)) for row in range(4)]
    c = float(max(sums)) * float(rng.choice([0.1, 0.7, 4.0]))
    result = compiled(way, lambda v, c: clip_pieces(way, v, rows, c), values, c, known=True)
    found = np.asarray(result).astype(float)
    said = f"{way}, {dtype}, threshold {c!r}, rows {rows.tolist()}, {values.tolist()}: {found.tolist()}"
    assert np.isfinite(found).all(), f"not finite: {said}"
    after = [sum(map(Fraction, found[rows == row].tolist()), Fraction(0)) for row in range(4)]
    assert sum(x * x for x in after) <= Fraction(c) ** 2, f"above the threshold: {said}"
    # Far enough from the threshold, where subnormal numbers that a compiler cannot see do not matter.
    if sum(x * x for x in sums) < Fraction(c) ** 2 * Fraction(0.9) and c > 1e-30:
        assert np.asarray(result).tobytes() == values.tobytes(), f"changed: {said}"


def clip_pieces(way, values, rows, c):
    if way == "jax":
        array = sparse.BCOO((values, jnp.asarray(rows)[:, None]), shape=(4,))
        return gradclip.clip_by_global_norm(array, c)[0].data
    return gradclip.clip_by_global_norm(tf.IndexedSlices(values, tf.constant(rows)), c)[0].values
