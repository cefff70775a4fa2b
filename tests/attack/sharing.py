"""Gradients that share memory, wholly or in part: each call does what it does to gradients apart."""

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

import gradclip
from attack import shapes, truth
from frameworks import ALL
from gradclip._src.inplace.norm import clip_grads_with_norm_

FRAMEWORKS = [f for f in ALL if f.name in ("numpy", "torch", "torch-device")]
DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64")
ONE_NUMBER = ("norm", "given norm", "value")
EACH_ITS_OWN = ("layers", "units", "adaptive")


class Case(NamedTuple):
    """Views of one memory and other gradients, in some order, and a call; `as_tree` passes the arrays themselves."""

    framework: Any
    dtype: str
    call: str
    ord: float
    share: float
    nonfinite: str
    as_tree: bool
    seed: int

    def __str__(self):
        return ", ".join(f"{key}={value!r}" for key, value in self._asdict().items() if key != "framework")


def draw(rng):
    """Return a random case."""
    framework = FRAMEWORKS[int(rng.integers(len(FRAMEWORKS)))]
    call = str(rng.choice([*ONE_NUMBER, *EACH_ITS_OWN]))
    dtype = str(rng.choice(DTYPES[:4] if call == "value" else DTYPES))
    as_tree = framework.name == "numpy" and call in ONE_NUMBER and rng.uniform() < 0.5
    ord = float(rng.choice(shapes.ORDERS))
    share, policy = float(rng.choice([0.01, 0.4, 0.9, 3.0])), str(rng.choice(["propagate", "zero", "drop"]))
    return Case(framework, dtype, call, ord, share, policy, as_tree, int(rng.integers(2**31)))


def gradients_of(case):
    """Return the case's gradients, always the same: views of one memory, and others."""
    rng = np.random.default_rng(case.seed)
    shape = tuple(int(n) for n in rng.integers(1, 7, size=2))
    scale = 2.0 ** rng.integers(-8, 6)
    buffer = case.framework.array(scale * rng.standard_normal(shape), case.dtype)
    views = [_view(rng, buffer) for _ in range(int(rng.integers(2, 5)))]
    others = [case.framework.array(rng.standard_normal((int(n), 2)), case.dtype) for n in rng.integers(1, 4, size=2)]
    if case.nonfinite != "propagate" and rng.uniform() < 0.5:
        buffer[int(rng.integers(shape[0])), int(rng.integers(shape[1]))] = float(rng.choice([math.nan, math.inf]))
    grads = [*views, *others]
    return [grads[index] for index in rng.permutation(len(grads))]


def _view(rng, buffer):
    """Return a matrix of some of a matrix' elements: all, a piece, every second row, or transposed."""
    rows, columns = (_cut(rng, length) for length in buffer.shape)
    view = buffer[rows, columns] if rng.uniform() < 0.7 else buffer[...]
    return view.T if rng.uniform() < 0.4 else view


def _cut(rng, length):
    start = int(rng.integers(length))
    return slice(start, int(rng.integers(start, length)) + 1, int(rng.integers(1, 3)))


def attack(rng):
    """Make one call on gradients that share memory and on their copies, and compare them and the bound."""
    case = draw(rng)
    with case.framework.mode():
        lying, apart = gradients_of(case), [copied(x) for x in gradients_of(case)]
        before = [np.array(case.framework.to_numpy(x)) for x in lying]
        threshold = case.share * max(1e-3, norm_of(before, case.ord))
        outcomes = []
        for grads in (lying, apart):
            given = grads if case.as_tree else [SimpleNamespace(grad=x) for x in grads]
            norm = make(case, given, threshold)
            after = grads if case.as_tree else [p.grad for p in given]
            outcomes.append((norm, [np.array(case.framework.to_numpy(x)) for x in after]))
    compare(case, *outcomes, before, threshold)


def copied(x):
    return x.copy() if isinstance(x, np.ndarray) else x.clone()


def norm_of(leaves, ord):
    finite = [np.where(np.isfinite(x), x, np.zeros_like(x)) for x in leaves]
    return float(truth.norm(finite, ord))


def make(case, given, threshold):
    """Make the call of a case; return the norms."""
    ones = [np.ones(x.grad.shape) for x in given] if case.call == "adaptive" else None
    if case.framework.name != "numpy" and ones:
        ones = [case.framework.array(x) for x in ones]
    return {
        "norm": lambda: gradclip.clip_grad_norm_(given, threshold, case.ord, nonfinite=case.nonfinite),
        "given norm": lambda: clip_grads_with_norm_(given, threshold, threshold / case.share),
        "value": lambda: gradclip.clip_grad_value_(given, threshold),
        "layers": lambda: gradclip.clip_grad_layer_norm_(given, threshold, ord=case.ord, nonfinite=case.nonfinite),
        "units": lambda: gradclip.clip_grad_unit_norm_(given, threshold, ord=case.ord, nonfinite=case.nonfinite),
        "adaptive": lambda: gradclip.adaptive_grad_clip_(
            given, case.share, ord=case.ord, params=ones, nonfinite=case.nonfinite
        ),
    }[case.call]()


def compare(case, shared, alone, before, threshold):
    """Fail unless gradients that share memory became what their copies became, and keep the bound."""
    (norm, after), (wanted, expected) = shared, alone
    for one, other in zip(flat(norm), flat(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, err_msg=str(case))
    rtol = {"float16": 4e-3, "bfloat16": 2e-2}.get(case.dtype, 2e-6)
    for x, y in zip(after, expected, strict=True):
        np.testing.assert_allclose(x.astype(complex), y.astype(complex), rtol=rtol, atol=1e-7, err_msg=str(case))
    if case.call == "norm" and all(np.isfinite(x).all() for x in before):
        assert truth.at_most(after, case.ord, threshold), str(case)


def flat(norms):
    """Return norms as a list of arrays."""
    if norms is None:
        return []
    return [np.asarray(norm) for norm in (norms if isinstance(norms, list) else [norms])]
