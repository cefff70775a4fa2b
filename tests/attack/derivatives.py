"""Derivatives beside finite differences in float64: by function, mode and order, on both sides of C and at zero."""

import math
import warnings
from contextlib import ExitStack
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.autograd.forward_ad as forward

import gradclip

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PyTorch imports this when it first differentiates forward, and warns of itself
    import torch._decomp.decompositions_for_jvp

ORDERS = (2.0, 2.0, 1.0, 1.5, 3.0, math.inf, -math.inf)
TOLERANCE = {"float32": 2e-3, "float64": 2e-6, "complex64": 2e-3, "complex128": 2e-6}
STEP = 1e-5


class Case(NamedTuple):
    """A function of (x, max_norm) with a scalar result, the point and the direction, and how it is differentiated."""

    function: str
    mode: str
    dtype: str
    ord: float
    x: np.ndarray
    direction: np.ndarray
    weights: np.ndarray
    max_norm: float
    of_threshold: float
    mask: Any

    def __str__(self):
        shown = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in self._asdict().items()}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


def _scalar(xp, weights, tree):
    """Return the real part of a weighted sum of all numbers."""
    flat = xp.concatenate([x.reshape(-1) for x in tree])
    product = flat * weights[: len(flat)]
    return (product.real if "complex" in str(product.dtype) else product).sum()


def _halves(x):
    return {"a": x[:2], "b": x[2:]}


FUNCTIONS = {
    "global_norm": lambda xp, x, c, case, w: gradclip.global_norm(_halves(x), case.ord) * w[0].real,
    "layer_norms": lambda xp, x, c, case, w: _norms(gradclip.layer_norms(_halves(x), case.ord), w),
    "clip_by_global_norm": lambda xp, x, c, case, w: _clipped(
        xp, w, gradclip.clip_by_global_norm(_halves(x), c, ord=case.ord)
    ),
    "clip_by_layer_norm": lambda xp, x, c, case, w: _by_layer(
        xp, w, gradclip.clip_by_layer_norm(_halves(x), c, ord=case.ord)
    ),
    "clip_by_value": lambda xp, x, c, case, w: _scalar(
        xp, w, list(gradclip.clip_by_value(_halves(x), case.max_norm).values())
    ),
    "per_example_clip": lambda xp, x, c, case, w: _scalar(
        xp, w, [gradclip.per_example_clip(x.reshape(2, -1), c, mask=case.mask)[0]]
    ),
}
WITHOUT_THRESHOLD = ("global_norm", "layer_norms", "clip_by_value")


def _norms(norms, w):
    return norms["a"] * w[0].real + norms["b"] * w[1].real


def _clipped(xp, w, made):
    return _scalar(xp, w, list(made[0].values())) + made[1] * w[-1].real


def _by_layer(xp, w, made):
    return _scalar(xp, w, list(made[0].values())) + _norms(made[1], w)


def draw(rng):
    """Return a case whose norms are not at their thresholds, nor its elements where a norm has a kink."""
    function = str(rng.choice(list(FUNCTIONS)))
    mode = str(rng.choice([*TORCH, *JAX]))
    real = function in ("clip_by_value", "per_example_clip") or "second" in mode
    dtype = str(rng.choice(["float32", "float64"] if real or rng.integers(3) else ["complex64", "complex128"]))
    size = 6
    x = (rng.permutation(size) + rng.uniform(0.6, 1.4, size)) * rng.choice([-1.0, 1.0], size)
    direction, weights = rng.normal(size=(2, size))
    if "complex" in dtype:
        phases = np.exp(2j * np.pi * rng.uniform(size=(3, size)))
        x, direction, weights = x * phases[0], direction * phases[1], weights * phases[2]
    x = x * 10.0 ** rng.integers(-3, 4)
    kind = str(rng.choice(["clipped", "unclipped", "mixed", "zero"], p=[0.4, 0.25, 0.2, 0.15]))
    if kind == "zero" and "second" in mode:  # a norm has no second derivative there
        kind = "clipped"
    scale = float(np.linalg.norm(x))
    max_norm = scale * {"clipped": 0.05, "unclipped": 20.0, "mixed": 0.62}.get(kind, 1.0)
    x = np.zeros_like(x) if kind == "zero" else x.astype(dtype)
    of_threshold = 0.0 if function in WITHOUT_THRESHOLD or rng.integers(2) else scale * rng.normal()
    mask = np.array([True, False]) if rng.integers(3) == 0 else None
    ord = float(rng.choice(ORDERS))
    return Case(function, mode, dtype, ord, x, direction * scale, weights, max_norm, of_threshold, mask)


# How each framework differentiates: the derivative along a direction, of x and of the threshold.


def _torch(case, x, c):
    return FUNCTIONS[case.function](torch, x, c, case, torch.tensor(case.weights.astype(x_dtype(x))))


def x_dtype(x):
    return str(x.dtype).rpartition(".")[2]


def _tensors(case, dtype=None):
    values = (case.x, case.max_norm, case.direction, case.of_threshold)
    real = "float64" if (dtype or case.dtype) in ("float64", "complex128") else "float32"
    dtypes = (dtype or case.dtype, real) * 2
    return [torch.tensor(np.asarray(v).astype(d)) for v, d in zip(values, dtypes, strict=True)]


def _along(gradient, direction):
    """Return the derivative along a direction from a gradient as PyTorch defines it."""
    total = (gradient.conj() * direction).sum()
    return float(total.real)


def _torch_autograd(case):
    x, c, v, dc = _tensors(case)
    x.requires_grad_(), c.requires_grad_()
    made = torch.autograd.grad(_torch(case, x, c), (x, c), allow_unused=True)
    return sum(_along(g, d) for g, d in zip(made, (v, dc), strict=True) if g is not None)


def _torch_func(case):
    x, c, v, dc = _tensors(case)
    made = torch.func.grad(lambda x, c: _torch(case, x, c), argnums=(0, 1))(x, c)
    return sum(_along(g, d) for g, d in zip(made, (v, dc), strict=True))


def _torch_jvp(case):
    x, c, v, dc = _tensors(case)
    return float(torch.func.jvp(lambda x, c: _torch(case, x, c), (x, c), (v, dc))[1])


def _torch_forward(case):
    x, c, v, dc = _tensors(case)
    with forward.dual_level():
        made = _torch(case, forward.make_dual(x, v), forward.make_dual(c, dc))
        tangent = forward.unpack_dual(made).tangent
        assert tangent is not None, f"no tangent: {case}"
        return float(tangent)


def _torch_second(case):
    x, c, v, _ = _tensors(case)
    return torch.func.jvp(lambda x: torch.func.grad(lambda x: _torch(case, x, c))(x), (x,), (v,))[1].numpy()


def _torch_hessian(case):
    x, c, v, _ = _tensors(case)
    return (torch.func.hessian(lambda x: _torch(case, x, c))(x) @ v).numpy()


def _jax(case, x, c):
    return FUNCTIONS[case.function](jnp, x, c, case, jnp.asarray(case.weights.astype(x.dtype)))


def _arrays(case):
    return [jnp.asarray(x.numpy()) for x in _tensors(case)]


def _jax_grad(case, compiled=False):
    x, c, v, dc = _arrays(case)
    made = (jax.jit if compiled else lambda f: f)(jax.grad(lambda x, c: _jax(case, x, c), argnums=(0, 1)))(x, c)
    return sum(_along(g.conj(), d) for g, d in zip(made, (v, dc), strict=True))


def _jax_jvp(case):
    x, c, v, dc = _arrays(case)
    return float(jax.jvp(lambda x, c: _jax(case, x, c), (x, c), (v, dc))[1])


def _jax_second(case):
    x, c, v, _ = _arrays(case)
    return np.asarray(jax.jvp(jax.grad(lambda x: _jax(case, x, c)), (x,), (v,))[1])


TORCH = {
    "torch autograd": _torch_autograd,
    "torch func.grad": _torch_func,
    "torch func.jvp": _torch_jvp,
    "torch forward_ad": _torch_forward,
    "torch second": _torch_second,
    "torch hessian, second": _torch_hessian,
}
JAX = {
    "jax grad": _jax_grad,
    "jax jit grad": lambda case: _jax_grad(case, True),
    "jax jvp": _jax_jvp,
    "jax second": _jax_second,
}


def expected(case):
    """Return the derivative, or for second ones that of the gradient, by central differences in float64."""
    wide = "complex128" if "complex" in case.dtype else "float64"
    x, c, v, dc = _tensors(case, wide)
    ends = [(x + h * v, c + h * dc) for h in (STEP, -STEP)]
    if "second" not in case.mode:
        high, low = (_torch(case, *end) for end in ends)
        return float(high - low) / (2 * STEP)
    high, low = (torch.func.grad(lambda x: _torch(case, x, c))(x) for x, _ in ends)
    return ((high - low) / (2 * STEP)).numpy()


def attack(rng):
    """Compare one derivative with finite differences."""
    case = draw(rng)
    with ExitStack() as stack:
        if case.mode in JAX and case.dtype in ("float64", "complex128"):
            stack.enter_context(jax.enable_x64(True))
        found = {**TORCH, **JAX}[case.mode](case)
    wanted = expected(case)
    largest = np.abs(case.weights).sum() * np.linalg.norm(case.direction) + abs(case.of_threshold)
    if "second" in case.mode:
        largest = largest * max(1.0, np.abs(case.x).max() / np.abs(case.x).min()) / np.abs(case.x).min()
    off = np.max(np.abs(np.asarray(found) - wanted))
    assert off <= TOLERANCE[case.dtype] * largest, f"{found}, by finite differences {wanted}: {case}"
