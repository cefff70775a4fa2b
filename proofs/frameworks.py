"""What each framework's own operations cut, where the kernels do not run: never above what is given.

Every upper half of a float32 number is tried with lower halves that a wrong cut would round up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch._dynamo  # loads Triton, which after TensorFlow would end the process
from claim import Claim, Loosened, Refuted

from gradclip._src.backends import portable
from gradclip._src.backends.portable import Portable
from gradclip._src.core import one_factor
from gradclip._src.core.formats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, Format, format_of, low_bits_mask

_LOWER = (0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
_BELOW_ONE_STEP = 2.0**-30
"""What float64 numbers have more than float32 numbers, relatively."""

Run = Callable[[Callable[[Portable, Any], Any], np.ndarray], np.ndarray]
"""Compute a result with a framework's backend, and return it in float64."""


def _torch(compute: Callable[[Portable, Any], Any], x: np.ndarray) -> np.ndarray:
    from gradclip._src.backends.torch.device import Torch

    return compute(Torch(torch.device("cpu"), visible=False), torch.from_numpy(x)).double().numpy()


def _jax(compute: Callable[[Portable, Any], Any], x: np.ndarray) -> np.ndarray:
    import jax

    from gradclip._src.backends.jax.traced import JaxTraced

    with jax.enable_x64(True):
        return np.asarray(jax.jit(partial(compute, JaxTraced(visible=False)))(x), np.float64)


def _tensorflow(compute: Callable[[Portable, Any], Any], x: np.ndarray) -> np.ndarray:
    import tensorflow as tf

    from gradclip._src.backends.tensorflow.graph import Graph

    once = tf.function(lambda x: tf.cast(compute(Graph(visible=False), x), tf.float64))
    return once.get_concrete_function(tf.constant(x))(tf.constant(x)).numpy()


def _mlx(compute: Callable[[Portable, Any], Any], x: np.ndarray) -> np.ndarray:
    import mlx.core as mx

    from gradclip._src.backends.mlx.lazy import Lazy

    once = mx.compile(partial(compute, Lazy(visible=False, wide=FLOAT64)))
    with mx.stream(mx.cpu):
        return np.asarray(once(mx.array(x, dtype=getattr(mx, x.dtype.name))).astype(mx.float64))


_RUNS: dict[str, tuple[Run, str]] = {
    "PyTorch": (_torch, portable.__name__),
    "JAX": (_jax, "gradclip._src.backends.jax.traced"),
    "TensorFlow": (_tensorflow, "gradclip._src.backends.tensorflow.graph"),
    "MLX": (_mlx, portable.__name__),
}


def _numbers(source: Format) -> np.ndarray:
    """Return numbers of every exponent of float32, or float64 numbers just below and above them, of both signs."""
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    x = (upper | np.array(_LOWER, np.uint32)).view(np.float32).reshape(-1)
    x = x[np.isfinite(x)]
    if source is FLOAT32:
        return x
    wide = x.astype(np.float64)
    return np.concatenate([wide, wide * (1 - _BELOW_ONE_STEP), wide * (1 + _BELOW_ONE_STEP)])


def _spacing(size: np.ndarray, target: Format) -> np.ndarray:
    """Return how far apart numbers of a format are from these on."""
    with np.errstate(under="ignore"):
        return np.maximum(np.ldexp(1.0, np.frexp(size)[1] - target.precision), target.step)


def _compare(name: str, x: np.ndarray, found: np.ndarray, least: np.ndarray, most: np.ndarray) -> None:
    """Raise `Refuted` if a magnitude is above the most, or below the least, or a sign has changed."""
    wrong = (np.abs(found) > most) | (np.abs(found) < least) | (np.signbit(found) != np.signbit(x))
    if wrong.any():
        raise Refuted(f"{name}: {x[wrong][0]!r} became {found[wrong][0]!r}, in {wrong.sum()} of {x.size} cases")


def _check_cuts(framework: str) -> str:
    """Check that numbers become narrower by rounding toward zero, in MLX nearly so, and lose no more below normal."""
    run, count = _RUNS[framework][0], 0
    for source, targets in ((FLOAT32, (FLOAT16, BFLOAT16)), (FLOAT64, (FLOAT16, BFLOAT16, FLOAT32))):
        x = _numbers(source)
        for target in targets:
            fits = x[np.abs(x) <= target.largest]
            like = SimpleNamespace(dtype=SimpleNamespace(name=target.name))

            def cut(backend: Portable, x: Any, like: Any = like, target: Format = target) -> Any:
                like.dtype = getattr(backend.xp, target.name) if framework in ("PyTorch", "MLX") else target.name
                return backend.narrow(x, like)

            size = np.abs(fits.astype(np.float64))
            lost = 1.5 if framework == "MLX" and source is FLOAT32 else 1 - 2.0**-45
            least = np.where(size < target.tiny, 0.0, size - _spacing(size, target) * lost)
            _compare(f"{framework}, {source.name} to {target.name}", fits, run(cut, fits), least, size)
            count += fits.size
    return f"{count / 1e6:.0f} million results"


def _check_below_normal(framework: str) -> None:
    """Check that products below the normal range lose a step at least, and that no others change."""
    run = _RUNS[framework][0]
    for form, dtype in ((FLOAT32, np.float32), (FLOAT64, np.float64)):
        others = [form.tiny - form.step, form.tiny, 1.5 * form.tiny, 1.0, form.largest]
        x = np.concatenate([np.arange(1 << 16) * form.step, others]).astype(dtype)
        x = np.concatenate([x, -x])
        size = np.abs(x.astype(np.float64))
        below = size < form.tiny
        most = np.where(below, np.maximum(size - form.step, 0.0), size)
        found = run(lambda backend, x: backend.not_above(x), x)
        _compare(f"{framework}, {form.name}", x, found, np.where(below, 0.0, size), most)


def _check(framework: str) -> str:
    _check_below_normal(framework)
    return _check_cuts(framework)


def _check_divisor() -> str:
    """Check that f / S is at most c, and nearly c: every significand, and numbers of every exponent."""
    from gradclip._src.backends.torch import multi_tensor

    one = np.arange(1 << 23, dtype=np.int32) | (127 << 23)
    every = (np.arange(1, 128, dtype=np.int32)[:, None] << 23 | np.arange(0, 1 << 23, 8191, dtype=np.int32)).reshape(-1)
    c = torch.from_numpy(np.concatenate([one - (1 << 23), every])).view(torch.float32)
    f, divisor = (x.double() for x in multi_tensor._factor_and_divisor(c, torch.device("cpu")))
    product = c.double() * divisor  # 32 digits at most
    if bool((f > product).any()) or bool((f < product * (1 - 0.006)).any()):
        raise Refuted("a quotient of two bfloat16 numbers is above the number that they stand for, or far below")
    return f"{c.numel() / 1e6:.0f} million numbers"


_MASK = low_bits_mask


def _nearest(x: Any) -> Any:
    return x.view(torch.float32).to(torch.bfloat16)


def claims() -> list[Claim]:
    """Return what is claimed of frameworks' operations."""
    found = []
    for framework, (_, inside) in _RUNS.items():
        rounded = Loosened(f"{inside}.low_bits_mask", lambda source, target: ~(~_MASK(source, target) >> 1))
        never = Loosened(f"{inside}.format_of", lambda x: replace(format_of(x), min_exponent=-5000))
        name, check = f"what {framework} makes narrower, or has below the normal range", partial(_check, framework)
        lowered = [Loosened("gradclip._src.backends.mlx.lazy._UNITS", 0.9)] if framework == "MLX" else []
        found.append(Claim(name, portable.__name__, "frameworks.py", check, (rounded, never, *lowered)))
    nearest = Loosened("gradclip._src.backends.torch.multi_tensor._upper_half", _nearest)
    name = "a bfloat16 number and a divisor instead of a number"
    return [*found, Claim(name, one_factor.__name__, "frameworks.py", _check_divisor, (nearest,))]
