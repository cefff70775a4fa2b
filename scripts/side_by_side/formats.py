"""Number formats: their spacing, and how to print their numbers."""

import math
import sys
from decimal import Decimal
from typing import Any

import ml_dtypes
import numpy as np

# The spacing of numbers relative to their power of two, and the spacing of the numbers nearest to zero.
ULP = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
STEP = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 2.0**-1074}
MOST = {
    "float16": 65504.0,
    "bfloat16": 2.0**128 - 2.0**120,
    "float32": 2.0**128 - 2.0**104,
    "float64": sys.float_info.max,
}
DIGITS = {"float16": 4, "bfloat16": 4, "float32": 8, "float64": 12}
_PARTS = {"complex64": "float32", "complex128": "float64"}


def numpy_dtype(name: str) -> Any:
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)


def format_of(array: np.ndarray) -> str:
    """Return the name of an array's real format: for complex arrays that of their parts, for integers float64."""
    name = array.dtype.name
    return _PARTS.get(name, name if name in ULP else "float64")


def coarser(first: str, second: str) -> str:
    return max(first, second, key=ULP.__getitem__)


def parts(array: np.ndarray) -> np.ndarray:
    """Return the real numbers of an array as a float64 vector. The two parts of a complex number are adjacent."""
    flat = np.asarray(array).ravel()
    if flat.dtype.kind == "c":
        flat = np.stack([flat.real, flat.imag], axis=-1).ravel()
    return flat.astype(np.float64)


def spacing(size: float, name: str) -> float:
    """Return the spacing of a format's numbers around `size`; for infinity, that of its largest numbers."""
    return max(STEP[name], ULP[name] * 2.0 ** (math.frexp(min(size, MOST[name]))[1] - 1)) if size else STEP[name]


def written(number: float | Decimal, name: str) -> str:
    """Return a number with as many digits as its format can distinguish."""
    digits, e, exponent = f"{number + 0:.{DIGITS[name]}g}".lower().partition("e")
    return (digits.rstrip("0").rstrip(".") if "." in digits else digits) + (f"e{int(exponent)}" if e else "")
