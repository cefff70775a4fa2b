import ml_dtypes
import numpy as np
import pytest

from gradclip._src.updates.files.dtypes import COUNTED, Dtype, float8_table

FLOAT8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]


@pytest.mark.parametrize("name", FLOAT8)
def test_every_byte_is_the_number_that_ml_dtypes_says(name):
    bytes_ = np.arange(256, dtype=np.uint8)
    expected = bytes_.view(getattr(ml_dtypes, name)).astype(np.float32)
    found = Dtype.named(name).numbers()[1](bytes_)
    np.testing.assert_array_equal(found, expected)
    numbers = ~np.isnan(expected)  # the sign of NaN means nothing
    np.testing.assert_array_equal(np.signbit(found[numbers]), np.signbit(expected[numbers]))


def test_numbers_known_by_heart():
    assert float8_table("float8_e4m3fn")[[0x38, 0x7E, 0x01]].tolist() == [1.0, 448.0, 2.0**-9]
    assert float8_table("float8_e5m2")[[0x3C, 0x7B, 0x7C]].tolist() == [1.0, 57344.0, np.inf]


@pytest.mark.parametrize(("order", "value"), [("<", 1.5), (">", 1.5)])
@pytest.mark.parametrize("code", ["f2", "f4", "f8", "c8", "c16"])
def test_both_byte_orders_give_native_numbers(order, value, code):
    data = np.array([value, -2], order + code)
    name, numbers = Dtype.of(data.dtype).numbers()
    found = numbers(data)
    assert found.dtype.isnative
    assert found.dtype.name == name
    assert found.tolist() == [value, -2]


def test_what_counts():
    assert [Dtype.named(x).counts for x in ("float16", "bfloat16", "complex64", "float8_e5m2")] == [True] * 4
    assert [Dtype.named(x).counts for x in ("int8", "bool", "uint64", "float8_e8m0fnu")] == [False] * 4
    assert not Dtype.of(np.dtype("<U3")).counts
    assert "float64" in COUNTED


def test_bfloat16_is_read_as_its_bits():
    assert Dtype.named("bfloat16").raw == np.uint16
