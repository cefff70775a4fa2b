"""Arrays drawn at random: every dtype, magnitude and layout in memory that a gradient may have."""

import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch

from frameworks import from_mlx, numpy_dtype, to_mlx

ORDERS = (2, 2, 2, 1, 3, 1.5, math.inf, -math.inf)
SIZES = (0, 1, 2, 3, 5, 7, 16, 17, 33, 257)
LARGE = (4097, 65535, 65536, 65537)


class Limits(NamedTuple):
    """Of a dtype the smallest number, the smallest normal and the largest one."""

    step: float
    normal: float
    largest: float


def limits(dtype: str) -> Limits:
    real = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
    found = ml_dtypes.finfo(numpy_dtype(real))
    return Limits(float(found.smallest_subnormal), float(found.smallest_normal), float(found.max))


def real_values(rng, dtype, size):
    """Return float64 numbers, of one of many kinds, within the dtype's range."""
    step, normal, largest = limits(dtype)
    signs = rng.choice([-1.0, 1.0], size=size)
    low, high = math.log2(step), math.log2(largest)
    kinds = {
        "normal": lambda: rng.normal(size=size),
        "one magnitude": lambda: rng.normal(size=size) * 2.0 ** rng.uniform(low, high - 4),
        "all magnitudes": lambda: signs * 2.0 ** rng.uniform(low, high, size=size),
        "whole numbers": lambda: rng.integers(-5, 6, size=size) * 2.0 ** int(rng.integers(low, high - 3)),
        "subnormal": lambda: signs * rng.integers(1, 100, size=size) * step,
        "about the smallest normal": lambda: signs * normal * rng.uniform(0.4, 3, size=size),
        "largest": lambda: signs * largest * rng.uniform(0.4, 1, size=size),
        "squares overflow": lambda: signs * math.sqrt(largest) * rng.uniform(0.5, 4, size=size),
        "squares underflow": lambda: signs * math.sqrt(step) * rng.uniform(0.2, 2, size=size),
        "alike": lambda: signs * 2.0 ** int(rng.integers(low, high - 1)),
        "one of many": lambda: np.where(rng.uniform(size=size) < 0.1, signs * 2.0 ** rng.uniform(low, high), 0.0),
        "zeros": lambda: np.zeros(size),
    }
    values = kinds[str(rng.choice(list(kinds)))]()
    return np.clip(values, -largest, largest)


def leaf(rng, dtype, size):
    """Return an array of one dimension. Magnitudes of complex numbers are within the range, too."""
    values = real_values(rng, dtype, size)
    if "complex" in dtype:
        imaginary = real_values(rng, dtype, size) if rng.integers(2) else rng.permutation(values)
        values = 0.7 * values + 0.7j * imaginary
    return values.astype(numpy_dtype(dtype))


def threshold(rng, leaves, p, norm):
    """Return a threshold at, next to, near or far from the norm, or at an end of the range."""
    near = float(min(norm, 1.7e308))
    kinds = [
        near,
        float(np.nextafter(near, 0)),
        float(np.nextafter(near, math.inf)),
        near * rng.uniform(),
        near * rng.uniform(0.999, 1.001),
        near * 10.0 ** rng.uniform(-9, 2),
        10.0 ** rng.uniform(-30, 30),
        float(np.float32(min(near, 3e38))),
        1.0,
        0.0,
        math.inf,
        5e-324,
        1e-45,
        1e308,
    ]
    weights = np.array([3, 2, 2, 4, 3, 3, 2, 2, 1, 0.5, 0.5, 0.3, 0.5, 0.3])
    return min(kinds[int(rng.choice(len(kinds), p=weights / weights.sum()))], math.inf)


def spoiled(rng, leaves):
    """Return the leaves with NaN or infinities in some places, or None where there is no element."""
    filled = [i for i, x in enumerate(leaves) if x.size]
    if not filled:
        return None
    leaves = [x.copy() for x in leaves]
    for _ in range(int(rng.integers(1, 4))):
        x = leaves[int(rng.choice(filled))]
        bad = rng.choice([math.nan, math.inf, -math.inf])
        x.reshape(-1)[int(rng.integers(x.size))] = complex(1, bad) if np.iscomplexobj(x) else bad
    return leaves


# Layouts: the same numbers, otherwise in memory. Each takes an array of one dimension, of NumPy or PyTorch.


def _every_third(x):
    wide = np.zeros(3 * x.size, x.dtype)
    wide[1::3] = x
    return wide, lambda wide: wide[1::3]


def _offset(x):
    wide = np.concatenate([x[:1], x])
    return wide, lambda wide: wide[1:]


def _transposed(x):
    rows = next((k for k in (5, 3, 2, 1) if x.size and x.size % k == 0), 1)
    flat = np.ascontiguousarray(x.reshape(rows, -1).T).reshape(-1) if x.size else x
    return flat, lambda flat: flat.reshape(-1, rows).T


def _scalar(x):
    return (x, lambda x: x.reshape(())) if x.size == 1 else (x, lambda x: x)


def _cube(x):
    return x, lambda x: x.reshape(1, -1, 1)


LAYOUTS = {
    "dense": lambda x: (x, lambda x: x),
    "every third": _every_third,
    "offset": _offset,
    "transposed": _transposed,
    "scalar": _scalar,
    "three axes": _cube,
}
NUMPY_LAYOUTS = ("reversed", "read-only", "broadcast", "other byte order", "unaligned")


def laid_out(rng, framework, x):
    """Return an array of the framework that holds the numbers of `x`, laid out at random, and the layout's name.

    A broadcast one holds the first of them again and again.
    """
    more = {"numpy": NUMPY_LAYOUTS, "torch": ("broadcast",), "torch-device": ("broadcast",)}.get(framework, ())
    name = str(rng.choice([*LAYOUTS, *more]))
    if name in LAYOUTS:
        base, view = LAYOUTS[name](x)
        if framework == "tensorflow":  # its tensors have one layout
            return _own(framework, np.ascontiguousarray(view(base)).reshape(view(base).shape)), name
        return view(_own(framework, base)), name
    return _special(framework, name, x), name


def _own(framework, base):
    if framework == "numpy":
        return base.copy()
    if framework.startswith("torch"):
        return as_tensor(base)
    if framework.startswith("mlx"):
        return to_mlx(base)
    if framework == "tensorflow":
        import tensorflow as tf

        return tf.constant(base)
    import jax.numpy as jnp

    return jnp.asarray(base)


def _special(framework, name, x):
    if name == "broadcast":
        one = _own(framework, x[:1])
        return (
            one.expand(x.size) if framework.startswith("torch") else np.broadcast_to(one, (x.size,) if x.size else (0,))
        )
    if name == "reversed":
        return x[::-1].copy()[::-1]
    if name == "other byte order":
        return x.astype(x.dtype.newbyteorder()) if x.dtype.kind in "fc" and x.dtype != ml_dtypes.bfloat16 else x.copy()
    if name == "unaligned":
        raw = np.zeros(x.nbytes + 1, np.uint8)
        raw[1:] = np.frombuffer(x.tobytes(), np.uint8)
        return raw[1:].view(x.dtype)
    fixed = x.copy()
    fixed.flags.writeable = False
    return fixed


def as_tensor(x):
    """Return a tensor in memory of its own."""
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def numbers(x: Any) -> np.ndarray:
    """Return a copy of what an array of any framework holds, flat, in the machine's byte order."""
    if isinstance(x, torch.Tensor):
        x = x.detach().contiguous().resolve_conj()
        x = x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype is torch.bfloat16 else x.numpy()
    if type(x).__module__ == "mlx.core":
        x = from_mlx(x)
    # NumPy takes no scalar of TensorFlow in bfloat16.
    x = np.asarray(x.numpy() if type(x).__name__ == "EagerTensor" else x)
    return x.astype(x.dtype if x.dtype == ml_dtypes.bfloat16 else x.dtype.newbyteorder("=")).reshape(-1)
