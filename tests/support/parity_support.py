"""What the side-by-side tests share: seeded inputs, a tolerance that follows from the dtype, and one comparison."""

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

REQUIRED = inspect.Parameter.empty
SIZES = (0, 1, 15, 16, 17, 65537)

# The spacing of numbers relative to their power of two, and the spacing of the numbers nearest to zero.
ULP = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
STEP = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 2.0**-1074}
for parts, whole in (("float32", "complex64"), ("float64", "complex128")):
    ULP[whole], STEP[whole] = ULP[parts], STEP[parts]


def tolerance(dtype: str, count: int = 1, *, ord: float = 2, peer_ulps: float = 0.0, shift: float = 0.0) -> float:
    """Return how far, relatively, a clipped element may be from another way of clipping it.

    Two units in the last place of the leaf's dtype for gradclip, four of float32, whose coefficient is lowered; what
    the norm of `count`
    float64 numbers is lowered by, so that the bound holds (and what `pow` may add for other orders than 1, 2 and the
    extremes); `peer_ulps` for the peer's own roundings, in the same dtype; `shift` for a constant that the peer adds
    to the norm, divided by the norm.
    """
    margin = (count + 64) * 2.0**-53
    if ord not in (1, 2, math.inf, -math.inf):
        margin = (margin + 2.0**-40) * max(1.0, 1.0 / ord)
    own = 4.0 if dtype in ("float32", "complex64") else 2.0
    return (own + peer_ulps) * ULP[dtype] + margin + shift


def plain_sum_ulps(count: int, ord: float = 2) -> float:
    """Return how far off a norm may be whose terms are added one after the other, in units of the last place.

    The rounding errors of a sum grow with the square root of its length (Higham and Mary, "A new approach to
    probabilistic rounding error analysis", 2019), half a unit each, and the root divides them by the order.
    """
    return 0.0 if math.isinf(ord) else 0.5 * math.sqrt(count) * max(1.0, 1.0 / ord)


def wide(array: Any) -> np.ndarray:
    """Return an array as float64, a complex one with its parts on a last axis of two."""
    data = np.asarray(array)
    if data.dtype.kind == "c":
        return np.stack([data.real, data.imag], axis=-1).astype(np.float64)
    return data.astype(np.float64)


def assert_matches(actual: Any, expected: Any, rtol: float, dtype: str, *, scale: Any = None) -> float:
    """Compare element by element, NaN equal to NaN; return the largest deviation in units of the last place.

    `rtol` is relative to the expected element, or to `scale` where that is a sum whose terms cancel. Below the normal
    range, where the spacing no longer shrinks with the numbers, two steps of it are allowed.
    """
    actual, expected = wide(actual), wide(expected)
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    finite = np.isfinite(actual) & np.isfinite(expected)
    assert np.array_equal(actual[~finite], expected[~finite], equal_nan=True), f"{actual} against {expected}"
    deviation = np.abs(actual[finite] - expected[finite])
    size = (np.abs(expected) if scale is None else wide(scale))[finite]
    allowed = rtol * size + 2.0 * STEP[dtype]
    wrong = np.flatnonzero(deviation > allowed)
    if wrong.size:
        first = wrong[0]
        pair = f"{actual[finite][first]!r}, expected {expected[finite][first]!r}"
        raise AssertionError(f"{wrong.size} of {actual.size} elements, the first {pair} +- {allowed[first]:.3g}")
    normal = np.maximum(size, STEP[dtype] / ULP[dtype])
    return float(np.max(deviation / normal, initial=0.0)) / ULP[dtype]


def ulps_apart(actual: Any, expected: Any, dtype: str) -> float:
    """Return the largest distance of elements, in units of the last place of the expected ones in a real dtype."""
    actual, expected = wide(actual), wide(expected)
    spacing = np.maximum(ULP[dtype] * 2.0 ** (np.frexp(expected)[1] - 1.0), STEP[dtype])
    return float(np.max(np.abs(actual - expected) / spacing, initial=0.0))


def assert_just_below(actual: Any, exact: Any, dtype: str) -> None:
    """Compare a clipped array with its exact value, worked out by hand: never larger, and smaller by 2 ulp at most."""
    size = int(np.size(np.asarray(exact)))
    assert_matches(actual, exact, tolerance(dtype, size), dtype)
    assert (np.abs(wide(actual)) <= np.abs(wide(exact)) * (1 + 2.0**-52)).all(), f"{actual} exceeds {exact}"


def reference_norm(leaves: Iterable[Any], ord: float = 2) -> float:
    """Return the norm of all leaves as one vector, summed without rounding."""
    magnitudes = np.concatenate([np.abs(np.asarray(x)).astype(np.float64).ravel() for x in leaves])
    if math.isinf(ord):
        return float(magnitudes.max() if ord > 0 else magnitudes.min())
    return math.fsum((magnitudes**ord).tolist()) ** (1.0 / ord)


def reference_clip(leaves: Sequence[Any], max_norm: float, ord: float = 2) -> list[np.ndarray]:
    """Return the leaves times min(1, max_norm / norm), in float64."""
    norm = reference_norm(leaves, ord)
    return [wide(x) * (max_norm / norm if norm > max_norm else 1.0) for x in leaves]


def gradients(dtype: Any, *, large: bool = False, seed: int = 0) -> dict[str, np.ndarray]:
    """Return gradients of awkward sizes: a scalar, nothing, odd ones, and one that is not contiguous.

    Their elements are some eighths, so that their squares fit every dtype, and so does the sum of them.
    """
    rng = np.random.default_rng(seed)
    sizes = SIZES[-1:] if large else SIZES[:-1]
    drawn = {f"size {n}": rng.standard_normal(n) for n in sizes}
    if not large:
        drawn["scalar"] = rng.standard_normal(())
        drawn["transposed"] = rng.standard_normal((5, 3)).T
    if np.dtype(dtype).kind == "c":
        drawn = {name: x + 1j * rng.standard_normal(x.shape) for name, x in drawn.items()}
    cast = {name: np.asarray(x / 8.0).astype(dtype, order="K") for name, x in drawn.items()}
    if not large:
        cast["strided"] = np.repeat(cast["size 17"], 2)[::2]
    return cast


def count_of(leaves: Iterable[Any]) -> int:
    """Return the number of elements of all leaves."""
    return sum(int(np.size(x)) for x in leaves)


def arguments(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Return the names and defaults of a function's arguments, in order; `REQUIRED` where there is no default."""
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]
