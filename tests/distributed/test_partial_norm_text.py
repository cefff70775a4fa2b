"""Numbers of a partial norm as JSON, and what is no number."""

import math

import pytest

from gradclip._src.distributed.partial_norm import from_plain, number, plain, refuse_constant


@pytest.mark.parametrize("value", [0.0, -1.5, 1e308, 5e-324, math.inf, -math.inf])
def test_numbers_come_back(value):
    assert from_plain(plain(value)) == value
    assert isinstance(plain(value), str) == math.isinf(value)


def test_nan_comes_back_and_other_text_stays():
    assert math.isnan(from_plain(plain(math.nan)))
    assert [from_plain(one) for one in ("NaN", "1", None)] == ["NaN", "1", None]


@pytest.mark.parametrize(("value", "error"), [(True, TypeError), ("1", TypeError), (10**400, ValueError)])
def test_what_is_no_number(value, error):
    with pytest.raises(error, match="numbers must hold numbers"):
        number("numbers", value)


def test_constants_that_json_lacks():
    with pytest.raises(ValueError, match="Infinity is not valid JSON"):
        refuse_constant("Infinity")
