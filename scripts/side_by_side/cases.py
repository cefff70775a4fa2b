"""The inputs: ordinary ones and extreme ones."""

import math
from dataclasses import dataclass

import numpy as np

from side_by_side.formats import numpy_dtype

DRAWN = np.random.default_rng(17).standard_normal(12).round(3)
SHAPES = ((6,), (2, 3))
THREE_FOUR = np.array([3.0, 0, 0, 0, 0, 0, 4.0, 0, 0, 0, 0, 0])


@dataclass(frozen=True)
class Case:
    """Gradients, and a threshold that every format represents exactly."""

    leaves: list[np.ndarray]
    threshold: float

    @property
    def answerable(self) -> bool:
        """Return whether any norm can be at most the threshold."""
        return self.threshold >= 0.0

    @property
    def repeats(self) -> bool:
        """Return whether a leaf is listed twice."""
        return len({id(x) for x in self.leaves}) < len(self.leaves)


def shaped(values: np.ndarray, *dtypes: str) -> list[np.ndarray]:
    """Return twelve numbers as two leaves, with one or two dtypes."""
    halves = zip((values[:6], values[6:]), SHAPES, dtypes * 2, strict=False)
    return [half.reshape(shape).astype(numpy_dtype(dtype)) for half, shape, dtype in halves]


def _with(**replaced: float) -> np.ndarray:
    values = DRAWN.copy()
    values[: len(replaced)] = list(replaced.values())
    return values


def _formats() -> dict[str, Case]:
    found = {}
    for dtype in ("float32", "float16", "bfloat16", "float64"):
        found[f"clipped, {dtype}"] = Case(shaped(DRAWN, dtype), 1.0)
        found[f"not clipped, {dtype}"] = Case(shaped(DRAWN, dtype), 64.0)
    found["clipped, complex64"] = Case(shaped(DRAWN + 1j * DRAWN[::-1], "complex64"), 1.0)
    found["clipped, float32 and bfloat16"] = Case(shaped(DRAWN, "float32", "bfloat16"), 1.0)
    return found


def _thresholds() -> dict[str, Case]:
    return {
        "threshold 0": Case(shaped(DRAWN, "float32"), 0.0),
        "threshold 0, zeros": Case(shaped(0 * DRAWN, "float32"), 0.0),
        "threshold 1, zeros": Case(shaped(0 * DRAWN, "float32"), 1.0),
        "threshold inf": Case(shaped(DRAWN, "float32"), math.inf),
        "threshold inf, zeros": Case(shaped(0 * DRAWN, "float32"), math.inf),
        "threshold inf, norm above 3.4e38": Case(shaped(np.sign(DRAWN) * 3e38, "float32"), math.inf),
        "threshold inf, an infinity": Case(shaped(_with(a=math.inf), "float32"), math.inf),
        "threshold -1": Case(shaped(DRAWN, "float32"), -1.0),
        "threshold -1, zeros": Case(shaped(0 * DRAWN, "float32"), -1.0),
        "threshold NaN": Case(shaped(DRAWN, "float32"), math.nan),
        "threshold 2^-130": Case(shaped(DRAWN, "float32"), 2.0**-130),
        "threshold 2^127": Case(shaped(np.sign(DRAWN) * 3e38, "float32"), 2.0**127),
    }


def _ranges() -> dict[str, Case]:
    return {
        "squares overflow, float32": Case(shaped(DRAWN * 1e30, "float32"), 1.0),
        "squares overflow, float16": Case(shaped(DRAWN * 300, "float16"), 1.0),
        "squares overflow, bfloat16": Case(shaped(DRAWN * 1e30, "bfloat16"), 1.0),
        "squares overflow, float64": Case(shaped(DRAWN * 1e200, "float64"), 1.0),
        "norm above 3.4e38": Case(shaped(np.sign(DRAWN) * 3e38, "float32"), 1.0),
        "squares underflow, float32": Case(shaped(DRAWN * 1e-30, "float32"), 2.0**-103),
        "squares underflow, float16": Case(shaped(DRAWN * 1e-4, "float16"), 2.0**-14),
        "squares underflow, bfloat16": Case(shaped(DRAWN * 1e-30, "bfloat16"), 2.0**-103),
        "squares underflow, float64": Case(shaped(DRAWN * 1e-200, "float64"), 2.0**-670),
        "subnormal numbers, float32": Case(shaped(DRAWN * 1e-40, "float32"), 2.0**-135),
        "norm of 4e-7": Case(shaped(DRAWN * 1e-7, "float32"), 2.0**-25),
        "400 leaves of 1, bfloat16": Case([np.ones((), numpy_dtype("bfloat16")) for _ in range(400)], 1.0),
        "3000 elements of 1, float16": Case([np.ones(3000, np.float16)], 1.0),
    }


def _others() -> dict[str, Case]:
    leaf = np.array([3.0, 4.0, 0, 0, 0, 0], np.float32)
    above = np.array([1.0, 2.0**-12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    return {
        "NaN": Case(shaped(_with(a=math.nan), "float32"), 1.0),
        "infinity": Case(shaped(_with(a=math.inf), "float32"), 1.0),
        "-infinity and NaN": Case(shaped(_with(a=-math.inf, b=math.nan), "float32"), 1.0),
        "norm 5 at threshold 5": Case(shaped(THREE_FOUR, "float32"), 5.0),
        "norm 5 at threshold 5, float64": Case(shaped(THREE_FOUR, "float64"), 5.0),
        "norm just above threshold 1": Case(shaped(above, "float32"), 1.0),
        "all elements equal": Case(shaped(np.ones(12), "float32"), 1.0),
        "one leaf twice": Case([leaf, leaf], 1.0),
        "scalars 3 and 4": Case([np.array(3.0, np.float32), np.array(4.0, np.float32)], 1.0),
        "a leaf without elements": Case([np.zeros(0, np.float32), leaf], 1.0),
        "only leaves without elements": Case([np.zeros(0, np.float32)], 1.0),
        "no leaves": Case([], 1.0),
    }


CASES = {**_formats(), **_thresholds(), **_ranges(), **_others()}
# The cases for orders other than 2, and for variants of functions that are tested on all cases elsewhere.
FEW = (
    "clipped, float32",
    "not clipped, float32",
    "clipped, bfloat16",
    "clipped, float64",
    "threshold 0",
    "threshold 0, zeros",
    "threshold inf",
    "threshold -1",
    "norm above 3.4e38",
    "norm 5 at threshold 5",
    "NaN",
    "infinity",
    "scalars 3 and 4",
    "a leaf without elements",
)
# The cases for sums over examples. JAX would take long to compile many leaves.
SUMS = tuple(name for name in CASES if not name.startswith("400 leaves"))
# The cases with a format or shape of their own: JAX must compile once more for each.
SLOW = tuple(n for n in CASES if "float16" in n or "float64" in n or "complex" in n or n.startswith("only leaves"))
# The cases for functions that only measure norms.
NORMS = tuple(name for name in CASES if not name.startswith(("threshold", "not clipped")))


def batch_of(leaves: list[np.ndarray]) -> list[np.ndarray]:
    """Return two examples with the same signs: the leaves, and the leaves divided by 2."""
    return [np.stack([x, x / x.dtype.type(2)]) for x in leaves]


def random_case(seed: int, dtype: str) -> Case:
    """Return random gradients with a norm above the threshold. Neither is near the limits of the format."""
    rng = np.random.default_rng([23, seed])
    values = rng.standard_normal(12) * 2.0 ** rng.integers(3, 6)
    return Case(shaped(values, dtype), float(rng.choice([0.25, 0.5, 1.0, 1.5])))
