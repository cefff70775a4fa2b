"""Floating-point formats: the few numbers that rounding arguments need."""

from dataclasses import dataclass

_PARTS = {"complex64": "float32", "complex128": "float64"}


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: `precision` significant bits, smallest normal `2**min_exponent`."""

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


def dtype_name(array: object) -> str:
    """Return the bare name of an array's dtype: `float32` for `torch.float32` and for NumPy's."""
    return str(array.dtype).rpartition(".")[2]  # type: ignore[attr-defined]


def format_of(array: object) -> Format:
    """Return the format of a real array, or of the parts of a complex one."""
    name = dtype_name(array)
    return _BY_NAME[_PARTS.get(name, name)]


def is_complex(array: object) -> bool:
    """Say whether the array holds complex numbers."""
    return dtype_name(array) in _PARTS
