"""The reasons why rows differ: quotes from docs/differences.md, and the rows that each explains."""

import re
from dataclasses import dataclass

from side_by_side.cases import CASES

NOT_FINITE = ("NaN", "infinity", "-infinity and NaN", "threshold inf, an infinity")
NO_THRESHOLD = ("threshold -1", "threshold -1, zeros", "threshold NaN")
HALF = tuple(name for name in CASES if "float16" in name)
FLOAT64 = tuple(name for name in CASES if "float64" in name)


@dataclass(frozen=True)
class Reason:
    """`text` is on the page; `why` is from the verdict; `functions` is a pattern; `library` is "" for all."""

    text: str
    why: str
    cases: tuple[str, ...]
    library: str = ""
    functions: str = ""

    def explains(self, library: str, function: str, case: str, why: str) -> bool:
        mine = self.library in ("", library) and re.match(self.functions, function) is not None
        return mine and why == self.why and case in self.cases


REASONS = [
    Reason("A negative or NaN threshold is a ValueError", "refused", NO_THRESHOLD),
    Reason(
        "An example with NaN or infinities contributes nothing to a per-example sum",
        "no right answer",
        NOT_FINITE,
        "optax",
        "per_example",
    ),
    Reason("finite gradients next to a NaN become NaN", "no right answer", ("NaN",), "jax-privacy"),
    Reason("One NaN or infinity makes all gradients NaN", "no right answer", ("infinity",)),
    Reason("One NaN or infinity makes all gradients NaN", "no right answer", NOT_FINITE, "Lucid"),
    Reason("A parameter listed twice counts once", "no right answer", ("one leaf twice",), "Lucid"),
    Reason("Norms of any order work", "answered", NOT_FINITE, "Lucid", ".*inf-norm"),
    Reason(
        "Complex gradients are not clipped by value", "refused", ("clipped, complex64",), "Lucid", "clip_grad_value"
    ),
    Reason("float64 results are lower by a few dozen ulp", "values", FLOAT64),
    Reason("Sums over examples are at least float32", "dtype", HALF, "optax", "per_example"),
    Reason("Each array keeps its dtype", "dtype", HALF, "declearn"),
    Reason("Each leaf keeps its dtype", "dtype", ("clipped, float32 and bfloat16",), "brainstate"),
    Reason("at least float32, never a half type", "dtype", HALF, "", ".*norm"),
    Reason("Each scalar keeps its shape", "shapes", ("scalars 3 and 4",), "declearn", ".*PyTorch"),
    Reason("A parameter listed twice counts once", "no right answer", ("one leaf twice",), "PyTorch"),
    Reason(
        "relies on the norm that you pass",
        "bound",
        ("norm just above threshold 1",),
        "PyTorch",
        "clip_grads_with",
    ),
    Reason("relies on the norm that you pass", "bound", ("norm above 3.4e38",), "TensorFlow", ".*use_norm"),
    Reason(
        "assumes that it is accurate to float32 precision", "far", ("clipped, float64",), "TensorFlow", ".*use_norm"
    ),
    Reason("zeros when the coefficient is below 1.2e-38", "far", ("norm above 3.4e38",), "TensorFlow", ".*XLA"),
    Reason(
        "An infinite norm is not above an infinite threshold",
        "no right answer",
        ("threshold inf, an infinity",),
        "PyTorch",
        "clip_grads_with",
    ),
]


def reason_for(library: str, function: str, case: str, why: str) -> Reason | None:
    """Return the first reason that explains a row, or None."""
    return next((reason for reason in REASONS if reason.explains(library, function, case, why)), None)
