"""What a case is given: arrays, layouts in memory, trees and thresholds, all drawn from the case's own name.

Only integers are drawn, by a generator that NumPy keeps as it is, so that every machine draws the same bits.
"""

import hashlib
import math

import ml_dtypes
import numpy as np

EXPONENTS = {"float16": (-24, 15), "bfloat16": (-133, 127), "float32": (-149, 127), "float64": (-1074, 1023)}
"""Of the smallest and of the largest numbers of each dtype."""
VALUES = ("ordinary", "ordinary", "ordinary", "whole", "wide", "large", "small", "zeros", "one", "nan", "inf")
LAYOUTS = ("plain", "plain", "plain", "transposed", "strided", "reversed", "expanded", "offset")
SHAPES = ((), (0,), (1,), (15,), (16,), (17,), (3, 5), (5, 3), (2, 3, 4), (1, 1), (33,), (2, 2, 3, 4), (0, 3), (4, 1))
LONG = ((65_537,), (257, 129), (4_099,))
CONTAINERS = ("list", "list", "dict", "nested", "bare", "with none", "tuple")
FACTORS = (2.0**-10, 0.25, 0.25, 0.75, 1.0, 1.5, 3.0, 1_000.0)


def generator(name):
    """Return random numbers that depend on the name alone."""
    return np.random.RandomState(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little"))


def one_of(rng, options):
    return options[rng.randint(len(options))]


def numpy_dtype(name):
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def real_part(dtype):
    return {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)


def real_values(rng, dtype, size, kind):
    """Return float64 numbers within the range of a real dtype."""
    low, high = EXPONENTS[dtype]
    fractions = rng.randint(-(2**20), 2**20 + 1, size) / 2.0**20
    if kind == "wide":
        return np.ldexp(fractions, rng.randint(low // 2, high // 2 + 1, size))
    if kind == "one":
        return np.where(np.arange(size) == size // 2, 0.75, 0.0)
    if kind == "whole":
        return rng.randint(-4, 5, size).astype(np.float64)
    exponent = {"large": high, "small": low + 6, "zeros": -3000}.get(kind, 3)
    values = np.ldexp(fractions, exponent)
    if kind in ("nan", "inf") and size:
        values[rng.randint(size)] = math.nan if kind == "nan" else math.inf * (-1) ** rng.randint(2)
    return values


def leaf(rng, dtype, shape, kind):
    """Return an array of a dtype and shape, contiguous."""
    size = math.prod(shape)
    if dtype.startswith(("int", "bool")):
        return rng.randint(0, 2 if dtype == "bool" else 100, size).astype(dtype).reshape(shape)
    values = real_values(rng, real_part(dtype), size, kind)
    if dtype.startswith("complex"):
        values = values + 1j * real_values(rng, real_part(dtype), size, "ordinary" if kind == "large" else kind)
    with np.errstate(all="ignore"):
        return values.astype(numpy_dtype(dtype)).reshape(shape)


def laid_out(array, layout):
    """Return the same numbers in another layout; `expanded` repeats the first of them."""
    if layout == "transposed":
        return np.ascontiguousarray(array.T).T if array.ndim else array
    if layout == "strided" and array.ndim:
        memory = np.ones((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
        memory[..., ::2] = array
        return memory[..., ::2]
    if layout == "reversed" and array.ndim:
        return array[::-1].copy()[::-1]
    if layout == "offset":
        memory = np.ones(array.size + 1, array.dtype)
        memory[1:] = array.reshape(-1)
        return memory[1:].reshape(array.shape)
    if layout == "expanded" and array.size:
        return np.broadcast_to(array.reshape(-1)[:1].copy().reshape(()), array.shape)
    return array


def in_container(leaves, container):
    """Return a tree with these leaves."""
    if container == "bare" and len(leaves) == 1:
        return leaves[0]
    if container == "dict":
        return {f"layer{index}": one for index, one in enumerate(leaves)}
    if container == "nested":
        return {"body": list(leaves[:-1]), "head": (leaves[-1],)} if leaves else {}
    if container == "with none":
        return [*leaves[:1], None, *leaves[1:]]
    return tuple(leaves) if container == "tuple" else list(leaves)


def prefix_of(tree, draw):
    """Return a prefix of the tree, one level deep, with a drawn threshold at each place."""
    if isinstance(tree, dict):
        return {key: draw() for key in tree}
    if isinstance(tree, list | tuple):
        return type(tree)(None if one is None else draw() for one in tree)
    return draw()


def largest(arrays):
    """Return the largest finite magnitude among arrays, or 1."""
    found = 0.0
    for array in arrays:
        if array.dtype.kind not in "iub" and array.size:
            wide = array.reshape(-1).astype(np.complex128 if array.dtype.kind == "c" else np.float64)
            wide = np.abs(wide.view(np.float64))
            found = max(found, float(np.where(np.isfinite(wide), wide, 0.0).max()))
    return found or 1.0


def threshold(rng, kind, largest):
    """Return a number for a threshold near a magnitude."""
    if kind == "wrong":
        kind = one_of(rng, ("negative", "nan", "text"))
    known = {"zero": 0.0, "inf": math.inf, "negative": -1.0, "nan": math.nan, "whole": 2, "text": "1.0"}
    if kind in known:
        return known[kind]
    return min(largest * one_of(rng, FACTORS), 3e38 if kind == "scalar" else 1e300)
