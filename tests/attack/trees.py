"""Clipping of trees by their norm, beside exact arithmetic: eager, compiled, in place, and as on a device."""

import math
from fractions import Fraction
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np

import gradclip
from attack import shapes, truth
from frameworks import ALL
from gradclip._src.core.formats import bare_name

PATHS = [(framework, False) for framework in ALL]
PATHS += [(framework, True) for framework in ALL if framework.name in ("numpy", "torch", "torch-device", "jax")]
POLICIES = ("propagate", "raise", "zero", "drop")
SLACK = {"float16": 0.01, "bfloat16": 0.01}
COMPILED = ((3,), (17, 0), (1, 33))
"""Sizes of the leaves of compiled calls, few, since each is compiled again."""


class Case(NamedTuple):
    """A tree, as it is (`given`) and in NumPy (`leaves`), and how it is clipped."""

    framework: Any
    in_place: bool
    dtypes: list
    layouts: list
    given: list
    leaves: list
    ord: float
    max_norm: float
    nonfinite: str

    def __str__(self):
        place = " in place" if self.in_place else ""
        held = ", ".join(
            f"{dtype}[{x.size}] {layout}: {np.array2string(x, threshold=6, edgeitems=3)}"
            for dtype, layout, x in zip(self.dtypes, self.layouts, self.leaves, strict=True)
        )
        return f"{self.framework.name}{place}, ord={self.ord}, max_norm={self.max_norm!r}, {self.nonfinite}: {held}"


def draw(rng):
    """Return a random case; the framework's mode must be entered to use it."""
    framework, in_place = PATHS[int(rng.integers(len(PATHS)))]
    sizes = _sizes(rng, framework)
    dtypes = [str(rng.choice(framework.dtypes)) for _ in sizes]
    if framework.jit:
        dtypes = [dtypes[0]] * len(sizes)
    ord = float(rng.choice(shapes.ORDERS)) if max(sizes, default=0) < 1000 else float(rng.choice([1, 2, 3, math.inf]))
    plain = [shapes.leaf(rng, dtype, size) for dtype, size in zip(dtypes, sizes, strict=True)]
    bad = shapes.spoiled(rng, plain) if rng.uniform() < 0.2 else None
    nonfinite = str(rng.choice(POLICIES)) if bad or not framework.jit else "propagate"
    if framework.jit and nonfinite == "raise":
        nonfinite = "propagate"
    with framework.mode():
        laid = [shapes.laid_out(rng, framework.name, x) for x in bad or plain]
    given, leaves = [x for x, _ in laid], [shapes.numbers(x) for x, _ in laid]
    finite = [np.where(np.isfinite(x), x, np.zeros_like(x)) for x in leaves]
    max_norm = shapes.threshold(rng, finite, ord, truth.norm(finite, ord))
    if framework.jit:
        max_norm = float(np.float32(min(max_norm, 3e38))) if "x64" not in framework.name else max_norm
    return Case(framework, in_place, dtypes, [name for _, name in laid], given, leaves, ord, max_norm, nonfinite)


def _sizes(rng, framework):
    if framework.jit:
        return COMPILED[int(rng.integers(len(COMPILED)))]
    sizes = [int(rng.choice(shapes.SIZES)) for _ in range(int(rng.integers(1, 5)))]
    return [int(rng.choice(shapes.LARGE))] if rng.uniform() < 0.03 else sizes


def attack(rng):
    """Clip one tree, and check what comes back."""
    case = draw(rng)
    finite = all(np.isfinite(x).all() for x in case.leaves)
    before = [x.tobytes() for x in case.leaves]
    try:
        with case.framework.mode():
            results, norm = _clipped(case)
            held = _numbers(results)
        assert finite or case.nonfinite != "raise", "nothing was raised"
    except FloatingPointError:
        assert case.nonfinite == "raise", f"raised: {case}"
        assert not finite, f"raised for finite numbers: {case}"
        results, held, norm = case.given, _numbers(case.given), None
    try:
        if not case.in_place or norm is None:
            assert [x.tobytes() for x in _numbers(case.given)] == before, "the input was changed"
        check_kinds(case, results, norm)
        if norm is not None:
            (check_finite if finite else check_policy)(case, held, float(norm))
        check_decision(case, finite)
    except AssertionError as error:
        shown = [np.array2string(x, threshold=6) for x in held]
        raise AssertionError(f"{error}\n{case}\nresults {shown}, norm {norm!r}") from error


def _numbers(arrays):
    return [shapes.numbers(x) for x in arrays]


def _clipped(case):
    options = {"nonfinite": case.nonfinite}
    if case.in_place:
        holders = [SimpleNamespace(grad=x) for x in case.given]
        norm = gradclip.clip_grad_norm_(holders, case.max_norm, case.ord, **options)
        return [holder.grad for holder in holders], norm
    if case.framework.jit:
        dtype = np.float64 if "x64" in case.framework.name else np.float32
        return compiled(gradclip.clip_by_global_norm, case.ord, case.nonfinite)(case.given, dtype(case.max_norm))
    return gradclip.clip_by_global_norm(case.given, case.max_norm, ord=case.ord, **options)


@cache
def compiled(function, ord, nonfinite):
    return jax.jit(lambda tree, max_norm: function(tree, max_norm, ord=ord, nonfinite=nonfinite))


def check_kinds(case, results, norm):
    """Check that shapes, dtypes and types are those of the input."""
    assert len(results) == len(case.given), "the structure differs"
    for x, y in zip(case.given, results, strict=True):
        assert type(x) is type(y) or isinstance(y, np.ndarray | np.generic | jax.Array), (type(x), type(y))
        assert (x.dtype, tuple(x.shape)) == (y.dtype, tuple(y.shape)), f"{x.dtype}{x.shape} became {y.dtype}{y.shape}"
    wide = {"float64", "complex128"} & set(case.dtypes)
    if norm is not None:
        assert bare_name(norm.dtype) == ("float64" if wide else "float32"), f"the norm is {norm.dtype}"


def smallest(case, dtype):
    """Return what a path may lose of an element below the normal range."""
    bounds = shapes.limits(dtype)
    return bounds.normal if case.framework.name.startswith("jax") or case.framework.traced else bounds.step


def lost(case):
    """Return what a norm may lose to elements below the normal range."""
    p = 1.0 if case.ord == -math.inf else case.ord
    steps = [smallest(case, dtype) for dtype in case.dtypes]
    count = sum(x.size * (2 if np.iscomplexobj(x) else 1) for x in case.leaves)
    return Fraction(max(steps, default=0.0)) * Fraction(count ** (1 / p) if not math.isinf(p) else 2.0)


def coarse(case, exact):
    """Return what else a result may lose: to magnitudes of complex numbers, to a multiplier that float32 holds."""
    magnitudes = case.ord != 2 and "complex128" in case.dtypes
    found = Fraction(float(shapes.limits("float64").step)) * 16 * sum(x.size for x in case.leaves) if magnitudes else 0
    return found + (exact * Fraction(2) ** -149 if case.framework.name == "torch-device" else 0)


def check_finite(case, held, norm):
    """Check the bound, that the result is no smaller than it needs to be, that it is untouched if it fits; the norm."""
    exact = truth.norm(case.leaves, case.ord)
    fits = truth.at_most(case.leaves, case.ord, case.max_norm)
    same = [x.tobytes() for x in held] == [x.tobytes() for x in case.leaves]
    assert truth.at_most(held, case.ord, case.max_norm), f"the norm {float(truth.norm(held, case.ord))!r} is too large"
    surely = exact * (1 + Fraction(1e-5)) + lost(case) <= case.max_norm if case.max_norm < math.inf else True
    if surely or (fits and decidable(case) and not case.framework.traced):
        assert same, "changed, although the norm is at most the threshold"
    if (case.max_norm < math.inf and not fits) or not same:
        slack = max((SLACK.get(dtype, 1e-5) for dtype in case.dtypes), default=0.0)
        least = min(exact, Fraction(case.max_norm)) * (1 - Fraction(slack)) - 3 * lost(case) - coarse(case, exact)
        if case.ord >= 1:
            assert truth.norm(held, case.ord) >= least, f"the norm {float(truth.norm(held, case.ord))!r} is too small"
    check_norm(case, exact, norm)


def decidable(case):
    """Say whether norms of this order are compared exactly: whole orders, of complex numbers 2, inf and -inf."""
    real = not any("complex" in dtype for dtype in case.dtypes)
    return case.ord == 2 or math.isinf(case.ord) or (real and case.ord % 1 == 0)


def check_norm(case, exact, norm):
    wide = bool({"float64", "complex128"} & set(case.dtypes))
    largest = shapes.limits("float64" if wide else "float32").largest
    if exact > Fraction(largest) * (1 + Fraction(1e-6)):
        assert norm == math.inf, f"the norm is {norm!r}, and beyond the range"
        return
    if norm == math.inf and exact > Fraction(largest) * (1 - Fraction(1e-6)):
        return
    assert math.isfinite(norm), f"the norm is {norm!r}, in truth {float(exact)!r}"
    allowed = exact * Fraction(1e-14 if wide else 1e-6) + lost(case)
    assert abs(Fraction(norm) - exact) <= allowed, f"the norm is {norm!r}, in truth {float(exact)!r}"


def check_policy(case, held, norm):
    """Check what happens to NaN and infinities."""
    if case.nonfinite == "propagate":
        assert not math.isfinite(norm), f"the norm is {norm!r}"
        assert all(np.isnan(x).all() for x in held), "not everything is NaN"
    elif case.nonfinite == "drop":
        assert not any(x.any() for x in held), "not everything is zero"
    else:
        zeroed = [np.where(np.isfinite(x), x, np.zeros_like(x)) for x in case.leaves]
        assert all(not y[~np.isfinite(x)].any() for x, y in zip(case.leaves, held, strict=True)), "not zero"
        check_finite(case._replace(leaves=zeroed, given=zeroed), held, norm)


def check_decision(case, finite):
    """Compare the public decision, which is exact everywhere but for compiled code, with the truth."""
    if not finite or not decidable(case) or case.framework.jit or case.in_place:
        return
    with case.framework.mode():
        said = gradclip.norm_at_most(case.given, case.max_norm, ord=case.ord)
    assert said == truth.at_most(case.leaves, case.ord, case.max_norm), f"norm_at_most says {said}"
