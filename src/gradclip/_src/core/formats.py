"""Floating-point formats: the few numbers needed to reason about rounding."""

import math
from collections.abc import Hashable
from dataclasses import dataclass

_PARTS = {"complex64": "float32", "complex128": "float64"}
_WITHOUT_VALUES = ("float0",)  # JAX's dtype of derivatives with respect to integers, which holds no numbers


@dataclass(frozen=True)
class Format:
    """A binary floating-point format with `precision` significant bits and smallest normal number `2**min_exponent`."""

    name: str
    precision: int
    min_exponent: int
    max_exponent: int

    @property
    def tiny(self) -> float:
        """Smallest normal number."""
        return 2.0**self.min_exponent

    @property
    def step(self) -> float:
        """Smallest subnormal number: the spacing of all numbers below `tiny`."""
        return 2.0 ** (self.min_exponent - self.precision + 1)

    @property
    def roundoff(self) -> float:
        """Largest relative error when a number in the normal range is rounded to nearest."""
        return 2.0**-self.precision

    @property
    def largest(self) -> float:
        """Largest finite number."""
        return (2.0 - 2.0 ** (1 - self.precision)) * 2.0 ** (self.max_exponent - 1)

    def toward_zero(self, number: float) -> float:
        """Return a number >= 0 rounded toward zero to this format. Infinity stays infinity."""
        if math.isinf(number) or number == 0:
            return number
        step = math.ldexp(1.0, max(math.frexp(number)[1] - self.precision, self.min_exponent - self.precision + 1))
        return min(number // step * step, self.largest)

    def power_fits(self, p: float, wide: "Format") -> bool:
        """Say whether |x|**p, summed over 2**40 elements, neither overflows nor underflows in `wide`."""
        smallest = self.min_exponent - self.precision + 1
        return p * smallest > wide.min_exponent and p * self.max_exponent < wide.max_exponent - 40


FLOAT16 = Format("float16", 11, -14, 16)
BFLOAT16 = Format("bfloat16", 8, -126, 128)
FLOAT32 = Format("float32", 24, -126, 128)
FLOAT64 = Format("float64", 53, -1022, 1024)
_BY_NAME = {f.name: f for f in (FLOAT16, BFLOAT16, FLOAT32, FLOAT64)}
SUPPORTED = (*_BY_NAME, *_PARTS)
# Cached: NumPy takes a microsecond to make a name. By the type of the dtype: `torch.compile` of PyTorch 2.11 cannot
# read a dict with NumPy's dtypes as keys.
_BARE_NAMES: dict[type, dict[Hashable, str]] = {}


def bare_name(dtype: Hashable) -> str:
    """Return the name of a dtype, such as `float32` for `torch.float32` and for NumPy's float32 in any byte order."""
    try:
        return _BARE_NAMES[type(dtype)][dtype]
    except KeyError:
        return _named(dtype)


def _named(dtype: Hashable) -> str:
    # PyTorch's dtypes have no name attribute, so take the end of `torch.float32`. NumPy calls `float0` void.
    held = getattr(dtype, "names", None)
    name: str = held[0] if held == _WITHOUT_VALUES else getattr(dtype, "name", str(dtype).rpartition(".")[2])
    # Only what gradclip computes with is cached, and nothing of TensorFlow, whose dtypes know their names.
    known = name in SUPPORTED or is_integer_name(name)
    if known and not hasattr(dtype, "as_numpy_dtype"):
        _BARE_NAMES.setdefault(type(dtype), {})[dtype] = name
    return name


def dtype_name(array: object) -> str:
    """Return the name of an array's dtype."""
    return bare_name(array.dtype)  # type: ignore[attr-defined]


def format_named(dtype: str) -> Format:
    """Return the format of a real dtype, or of a complex dtype's parts."""
    return _BY_NAME[_PARTS.get(dtype, dtype)]


def format_of(array: object) -> Format:
    """Return the format of a real array, or of a complex array's parts."""
    return format_named(dtype_name(array))


def is_integer_name(dtype: str) -> bool:
    """Say whether a dtype holds integers or booleans."""
    return dtype.startswith(("int", "uint", "bool"))


def is_quantized_name(dtype: str) -> bool:
    """Say whether a dtype holds integers that stand for other numbers."""
    return dtype.startswith(("qint", "quint"))


def is_empty_name(dtype: str) -> bool:
    """Say whether a dtype holds no numbers at all."""
    return dtype in _WITHOUT_VALUES


def is_complex_name(dtype: str) -> bool:
    """Say whether a dtype is complex."""
    return dtype in _PARTS


def is_complex(array: object) -> bool:
    """Say whether an array is complex."""
    return is_complex_name(dtype_name(array))


def product_format(array: object, wide: Format) -> Format:
    """Return the format in which an array's elements are multiplied: float32 if it can hold them, else `wide`."""
    return FLOAT32 if format_of(array).precision <= FLOAT32.precision else wide


def low_bits_mask(source: Format, target: Format) -> int:
    """Return an integer mask that keeps the bits of a `source` number that fit in the narrower `target`."""
    # A negative integer has all higher bits set, so the mask works for any integer size.
    return -(1 << (source.precision - target.precision))


def sum_dtype(x: object, wide: object, dtype: str | None) -> str:
    """Return the result dtype of a sum over examples of `x`: real or complex, like `wide`."""
    real = dtype or ("float64" if format_of(x).precision == 53 else "float32")
    if "complex" in dtype_name(wide):
        return "complex128" if real == "float64" else "complex64"
    return real
