"""Trees with integers among the gradients, beside the same trees without: every bit is the same, the integers too."""

import math

import numpy as np
import optree

import gradclip
from attack import shapes
from frameworks import ALL

DTYPES = ("int8", "int16", "int32", "uint8", "uint16", "uint32", "bool")
ORDERS = (1, 2, 3, math.inf, -math.inf)
POLICIES = ("propagate", "zero", "drop")


def attack(rng):
    """Make one call of a random kind on a random tree, with integers in some places and without."""
    framework = ALL[int(rng.integers(len(ALL)))]
    name, call = list(CALLS.items())[int(rng.integers(len(CALLS)))]
    dtype = str(rng.choice(framework.dtypes))
    ord, max_norm = float(rng.choice(ORDERS)), float(10.0 ** rng.integers(-3, 4))
    nonfinite = str(rng.choice(POLICIES))
    plain = {f"w{i}": shapes.leaf(rng, dtype, int(rng.integers(1, 9))) for i in range(int(rng.integers(1, 4)))}
    if rng.uniform() < 0.2:
        plain["w0"].flat[0] = math.nan
    integers = {f"{rng.choice(list('avz'))}{i}": drawn(rng) for i in range(int(rng.integers(1, 5)))}
    told = f"{name} on {framework.name}, {dtype}, ord={ord}, max_norm={max_norm}, {nonfinite}: {plain} and {integers}"
    with framework.mode():
        floats, others = ({key: framework.from_numpy(x) for key, x in tree.items()} for tree in (plain, integers))
    both = {**others, **floats}
    if name == "clip_by_value" and "complex" in dtype:
        return
    expected, mixed = (framework.call(lambda t: call(t, max_norm, ord, nonfinite), t) for t in (floats, both))
    compare(told, results(expected), results(mixed), integers)


def drawn(rng):
    """Return an array of integers or booleans, sometimes large, sometimes empty."""
    shape = tuple(rng.integers(0, 4, size=int(rng.integers(0, 3))))
    return rng.integers(0, 2**7, size=shape).astype(str(rng.choice(DTYPES)))


CALLS = {
    "global_norm": lambda t, c, p, bad: gradclip.global_norm(t, p),
    "layer_norms": lambda t, c, p, bad: gradclip.layer_norms(t, p),
    "clip_by_global_norm": lambda t, c, p, bad: gradclip.clip_by_global_norm(t, c, ord=p, nonfinite=bad),
    "clip_by_layer_norm": lambda t, c, p, bad: gradclip.clip_by_layer_norm(t, c, ord=p, nonfinite=bad),
    "clip_by_unit_norm": lambda t, c, p, bad: gradclip.clip_by_unit_norm(t, c, ord=p, nonfinite=bad),
    "adaptive_grad_clip": lambda t, c, p, bad: gradclip.adaptive_grad_clip(t, t, clipping=c, ord=p, nonfinite=bad),
    "clip_by_value": lambda t, c, p, bad: gradclip.clip_by_value(t, c),
}


def results(found):
    """Return the leaves of a result as flat NumPy arrays, by their paths."""
    paths, leaves, _ = optree.tree_flatten_with_path(found)
    return dict(zip(paths, map(shapes.numbers, leaves), strict=True))


def compare(told, expected, mixed, integers):
    """Check that results are those without integers, and besides these, as they were, and zeros for their norms."""
    for path, x in expected.items():
        assert np.array_equal(mixed.pop(path), x, equal_nan=True), f"integers change {path}: {told}"
    for path, x in mixed.items():
        known = integers[path[-1]]
        kept = x.dtype == known.dtype and np.array_equal(x, known.reshape(-1))
        assert kept or (x.dtype == "float32" and x.tolist() == [0.0]), f"{path} is {x!r}: {told}"
