"""Hostile settings of the frameworks: every call gives the bits that it gives without them."""

import contextlib
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

import gradclip
from attack import shapes
from frameworks import WITH_FLOAT32


class Case(NamedTuple):
    """A call on a tree of a framework, under a setting."""

    framework: Any
    call: str
    setting: str
    ord: float
    max_norm: float
    nonfinite: str
    leaves: list

    def __str__(self):
        held = [f"{x.dtype} {np.array2string(x, threshold=6)}" for x in self.leaves]
        name, *others = self._asdict().items()
        shown = ", ".join(f"{key}={value!r}" for key, value in others if key != "leaves")
        return f"{name[1].name}, {shown}, leaves {held}"


# Settings: each a context that is entered around a call.


@contextlib.contextmanager
def _until(change, undo):
    change()
    try:
        yield
    finally:
        undo()


def _default_dtype(dtype):
    return lambda: _until(lambda: torch.set_default_dtype(dtype), lambda: torch.set_default_dtype(torch.float32))


def _default_device(name):
    return lambda: _until(lambda: torch.set_default_device(name), lambda: torch.set_default_device(None))


def _flushing():
    return _until(lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False))


def _deterministic():
    change = torch.use_deterministic_algorithms
    return _until(lambda: change(True), lambda: change(False))


def _threads():
    before = torch.get_num_threads()
    return _until(lambda: torch.set_num_threads(before + 3), lambda: torch.set_num_threads(before))


ANY = {
    "np.seterr raise": lambda: np.errstate(all="raise"),
    "torch default float16": _default_dtype(torch.float16),
    "torch default bfloat16": _default_dtype(torch.bfloat16),
    "torch default float64": _default_dtype(torch.float64),
    "torch default device meta": _default_device("meta"),
    "flush denormal": _flushing,
    "a thread of its own": contextlib.nullcontext,
}
TORCH = {
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "deterministic algorithms": _deterministic,
    "more threads": _threads,
    "torch device context": lambda: torch.device("meta"),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}
JAX = {
    "x64": lambda: jax.enable_x64(True),
    "leaks": jax.checking_leaks,
    "strict promotion of dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "no promotion of ranks": lambda: jax.numpy_rank_promotion("raise"),
    "highest precision": lambda: jax.default_matmul_precision("highest"),
    "debug nans": lambda: jax.debug_nans(True),
    "no jit": jax.disable_jit,
}


def settings_of(framework):
    more = {"numpy": {}, "torch": TORCH, "torch-device": TORCH, "mlx": {}, "mlx-device": {}}.get(framework.name, JAX)
    found = ANY | more
    if framework.name == "torch-device":
        # PyTorch's operations flush then: bits differ, the bound holds, of which `exact/test_flushing.py` is the test.
        del found["flush denormal"]
    if framework.name == "mlx-device":
        del found["a thread of its own"]  # what MLX has not computed yet, only the thread that asked for it can
    return found


# Calls: each returns a list of arrays, numbers and booleans.


def _in_place(tree, case):
    holders = [SimpleNamespace(grad=x) for x in tree]
    norm = gradclip.clip_grad_norm_(holders, case.max_norm, case.ord, nonfinite=case.nonfinite)
    return [norm, *(holder.grad for holder in holders)]


def _clip(tree, case):
    clipped, norm = gradclip.clip_by_global_norm(tree, case.max_norm, ord=case.ord, nonfinite=case.nonfinite)
    return [*clipped, norm]


def _by_layer(tree, case):
    clipped, norms = gradclip.clip_by_layer_norm(tree, case.max_norm, ord=case.ord, nonfinite=case.nonfinite)
    return [*clipped, *norms]


def _examples(tree, case):
    batch = [x.reshape(x.shape[0], -1) for x in tree]
    total, info = gradclip.per_example_clip(batch, case.max_norm)
    return [*total, *info]


def _partial(tree, case):
    known = gradclip.partial_norm(tree, case.ord)
    return [known.norm, *known.clip(tree, case.max_norm)]


CALLS = {
    "global_norm": lambda tree, case: [gradclip.global_norm(tree, case.ord)],
    "layer_norms": lambda tree, case: gradclip.layer_norms(tree, case.ord),
    "clip_by_global_norm": _clip,
    "clip_by_layer_norm": _by_layer,
    "clip_by_value": lambda tree, case: gradclip.clip_by_value(tree, case.max_norm),
    "per_example_clip": _examples,
    "clip_grad_norm_": _in_place,
    "grad_norm": lambda tree, case: [gradclip.grad_norm([SimpleNamespace(grad=x) for x in tree], case.ord)],
    "partial_norm": _partial,
    "norm_at_most": lambda tree, case: [gradclip.norm_at_most(tree, case.max_norm, ord=case.ord)],
}
TRACED = list(CALLS)[:6]
SIZES = ((3, 4), (7, 7))


def draw(rng):
    framework = WITH_FLOAT32[int(rng.integers(len(WITH_FLOAT32)))]
    call = str(rng.choice(TRACED if framework.jit else list(CALLS)))
    setting = str(rng.choice(list(settings_of(framework))))
    names = [dtype for dtype in framework.dtypes if "complex" not in dtype]
    dtypes = [str(rng.choice(names)) for _ in range(2)]
    sizes = SIZES[1 if call == "per_example_clip" else int(rng.integers(2))]
    leaves = [shapes.leaf(rng, dtype, n) for dtype, n in zip(dtypes, sizes, strict=True)]
    nonfinite = "propagate"
    if rng.integers(4) == 0 and not setting.startswith("debug"):
        leaves, nonfinite = shapes.spoiled(rng, leaves), str(rng.choice(["propagate", "zero", "drop"]))
    ord = float(rng.choice([2, 2, 1, 3, np.inf]))
    with np.errstate(all="ignore"):
        norm = np.sqrt(sum(float((x.astype(np.float64) ** 2).sum()) for x in leaves))
    near = float(norm) if 0 < norm < 1e300 else 1.0
    max_norm = float(np.float32(min(near * float(rng.choice([1e-3, 0.5, 1.0, 2.0])), 3e38)))
    return Case(framework, call, setting, ord, max_norm, nonfinite, leaves)


def attack(rng):
    """Make one call without and with a setting, and compare."""
    case = draw(rng)
    # XLA reads subnormal numbers as zeros, which code that is not compiled does not.
    bare = case.framework if case.setting != "no jit" else replace(case.framework, jit=False)
    wanted = outcome(case._replace(framework=bare), contextlib.nullcontext)
    found = outcome(case, settings_of(case.framework)[case.setting])
    assert found == wanted, f"{found}, without the setting {wanted}: {case}"


def outcome(case, setting):
    """Return what a call returns, readable and to the last bit, or the error that it raises."""
    with case.framework.mode(), warnings.catch_warnings():
        tree = [case.framework.from_numpy(x.copy()) for x in case.leaves]
        made: list = []
        try:
            with setting():
                _run(lambda: made.extend(_call(case, tree)), apart=case.setting.startswith("a thread"))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return [_shown(x) for x in made]


def _call(case, tree):
    if not case.framework.jit:
        return CALLS[case.call](tree, case)
    return jax.jit(lambda tree: CALLS[case.call](tree, case))(tree)


def _run(function, *, apart):
    if not apart:
        function()
        return
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()


def _shown(x):
    """Return what tells two results apart: dtype, device, shape, bits."""
    if isinstance(x, bool | float | int):
        return repr(x)
    device = str(getattr(x, "device", "")) if isinstance(x, torch.Tensor) else ""
    return str(x.dtype), device, tuple(x.shape), shapes.numbers(x).tobytes().hex()
