"""The numbers of floating-point formats, beside those that NumPy and ml_dtypes state."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch

from gradclip._src.core import formats
from gradclip._src.core.formats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64


@pytest.mark.parametrize("format", [FLOAT16, BFLOAT16, FLOAT32, FLOAT64], ids=lambda f: f.name)
def test_as_the_libraries_state_them(format):
    stated = ml_dtypes.finfo(format.name)
    assert float(stated.tiny) == format.tiny
    assert float(stated.smallest_subnormal) == format.step
    assert float(stated.eps) == 2 * format.roundoff
    assert float(stated.max) == (2.0 - 2.0 ** (1 - format.precision)) * 2.0 ** (format.max_exponent - 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, np.dtype(ml_dtypes.bfloat16), ml_dtypes.bfloat16, "bfloat16"])
def test_one_name_in_every_spelling(dtype):
    assert formats.bare_name(np.dtype(dtype) if dtype is ml_dtypes.bfloat16 else dtype) == "bfloat16"


def test_the_byte_order_is_no_part_of_a_name():
    assert formats.bare_name(np.dtype(">f4")) == formats.bare_name(np.dtype("<f4")) == "float32"


def test_names_of_datetimes_in_two_units_do_not_keep_pytorch_from_compiling():
    assert [formats.bare_name(np.dtype(name)) for name in ("M8[s]", "M8[ns]")] == ["datetime64[s]", "datetime64[ns]"]
    torch.compiler.reset()
    compiled = torch.compile(lambda x: formats.dtype_name(x) == "float32", backend="eager", fullgraph=True)
    assert compiled(torch.ones(2))


def test_complex_numbers_have_the_format_of_their_parts():
    assert formats.format_named("complex64") is FLOAT32
    assert formats.format_of(np.ones(1, complex)) is FLOAT64
    assert [formats.is_complex_name(name) for name in ("complex64", "float64")] == [True, False]


def test_squares_fit_where_no_sum_of_them_leaves_the_range():
    assert FLOAT32.power_fits(2, FLOAT64)
    assert not FLOAT64.power_fits(2, FLOAT64)
    assert not FLOAT32.power_fits(2, FLOAT32)
    assert FLOAT16.power_fits(3, FLOAT64)


@pytest.mark.parametrize(
    ("dtype", "wide", "asked", "expected"),
    [
        ("float16", "float64", None, "float32"),
        ("float64", "float64", None, "float64"),
        ("float32", "float64", "float64", "float64"),
        ("complex64", "complex128", None, "complex64"),
        ("float32", "complex128", "float64", "complex128"),
    ],
)
def test_sums_have_the_precision_asked_for(dtype, wide, asked, expected):
    arrays = SimpleNamespace(dtype=dtype), SimpleNamespace(dtype=wide)
    assert formats.sum_dtype(*arrays, asked) == expected


def test_low_bits_are_what_the_narrower_format_lacks():
    assert formats.low_bits_mask(FLOAT64, FLOAT32) == -(2**29)
