"""Tapes and accumulators around a `tf.function` that clips in branches of any depth: as in eager code."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

import gradclip

CALLS = ("global", "layers", "units", "zero", "value")


class Case(NamedTuple):
    """What clips, within which branches, how it is differentiated, and of which order."""

    call: str
    branches: tuple
    kind: str
    order: float
    compiled: bool
    max_norm: float
    x: np.ndarray
    direction: np.ndarray


def draw(rng):
    branches = tuple(str(rng.choice(["cond", "switch", "function", "persistent"])) for _ in range(int(rng.integers(4))))
    call, kind = str(rng.choice(CALLS)), str(rng.choice(["first", "second", "forward"]))
    order = float(rng.choice([2.0, 2.0, 1.0, 3.0])) if call in ("global", "layers", "zero") else 2.0
    x, direction = rng.standard_normal((2, 2, 3))
    compiled = not branches and bool(rng.integers(2))  # XLA lacks what TensorFlow's own derivatives of branches need
    return Case(call, branches, kind, order, compiled, 10.0 ** rng.uniform(-1, 1), x, direction)


def value(case, x, c):
    """Return a number that depends on all results of a call, with second derivatives."""
    if case.call == "layers":
        made = gradclip.clip_by_layer_norm([x, 2 * x[0]], c, ord=case.order)
    elif case.call == "units":
        made = gradclip.clip_by_unit_norm(x, c, unit_axis=0)
    elif case.call == "value":
        made = gradclip.clip_by_value(x, case.max_norm)
    else:
        policy = "zero" if case.call == "zero" else "propagate"
        made = gradclip.clip_by_global_norm(x, c, ord=case.order, nonfinite=policy)
    return tf.add_n([tf.reduce_sum(tf.sin(part)) for part in tf.nest.flatten(made)])


def within(case, x, c, branches):
    """Return the value, computed within these branches from tensors that lie outside of them."""
    if not branches:
        return value(case, x, c)
    outside, rest = x * 1.5, branches[1:]
    if branches[0] == "cond":
        return tf.cond(c > 0.0, lambda: within(case, outside, c, rest), lambda: c)
    if branches[0] == "switch":
        return tf.switch_case(tf.cast(c > 0.0, tf.int32), [lambda: c, lambda: within(case, outside, c, rest)])
    if branches[0] == "function":
        return tf.function(lambda: within(case, outside, c, rest), autograph=False)()
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(outside)
        made = within(case, outside, c, rest)
    return made + tf.reduce_sum(tape.gradient(made, outside))


def differentiated(case, function):
    """Return the derivatives, taken outside of the function."""
    given = [tf.constant(case.x), tf.constant(case.max_norm, tf.float64)]
    if case.kind == "forward":
        tangents = [tf.constant(case.direction), tf.constant(0.5, tf.float64)]
        with tf.autodiff.ForwardAccumulator(given, tangents) as accumulator:
            made = function(*given)
        return [accumulator.jvp(made, unconnected_gradients="zero")]
    with tf.GradientTape() as outer:
        outer.watch(given)
        with tf.GradientTape() as tape:
            tape.watch(given)
            made = function(*given)
        slopes = tape.gradient(made, given, unconnected_gradients="zero")
        total = tf.add_n([tf.reduce_sum(tf.sin(slope)) for slope in slopes])
    return slopes if case.kind == "first" else outer.gradient(total, given, unconnected_gradients="zero")


def attack(rng):
    """Compare the derivatives of one case with those of the same calls in eager code."""
    case = draw(rng)

    def function(x, c):
        return within(case, x, c, case.branches)

    found = differentiated(case, tf.function(function, autograph=False, jit_compile=case.compiled or None))
    for ours, known in zip(found, differentiated(case, function), strict=True):
        np.testing.assert_allclose(ours, known, rtol=1e-6, atol=1e-9, err_msg=str(case))
