"""JSON that any reader takes for the same: numbers come back to the bit, and what is not JSON is refused."""

import json
import math

import numpy as np
import pytest

from gradclip._src.json_text import from_json, to_json


@pytest.mark.parametrize("value", [0.0, -0.0, -1.5, 1e308, 5e-324, 1 / 3, math.inf, -math.inf, math.nan])
def test_numbers_come_back(value):
    given = {"a": value, "b": [[value], {"nan": value}]}
    assert repr(from_json(to_json(given))) == repr(given)
    told = json.loads(to_json(given), parse_constant=pytest.fail)
    assert isinstance(told["a"], str) == (not math.isfinite(value))
    assert to_json(np.float64(value)) == to_json(value)


def test_other_text_is_no_number():
    given = {"a": ["NaN", "Infinity", "1", "", None, {}]}
    assert from_json(to_json(given)) == given


def test_numbers_are_rounded_only_if_asked():
    given = {"a": [1 / 3, 5e-324, -0.0, 2**53 + 1], "b": {"c": (-math.inf, 1 / 3)}, "d": None, "e": True}
    assert repr(json.loads(to_json(given))) == repr(given | {"b": {"c": ["-inf", 1 / 3]}})
    assert to_json([1 / 3, (12345.678,)], 3) == "[0.333, [12300.0]]"
    assert to_json({"a": math.nan}, indent=2) == '{\n  "a": "nan"\n}'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a": NaN}', "NaN is not valid JSON"),
        ("[-Infinity]", "-Infinity is not valid JSON"),
        ('[{"a": 1, "b": 2, "a": 1}]', "a name occurs twice"),
        ("[" * 10**5, "nested too deeply"),
        ('{"a": 1', "delimiter"),
        (b"\xff\xfe\xfd", "decode"),
    ],
)
def test_what_readers_take_for_different_values_is_refused(text, why):
    with pytest.raises(ValueError, match=why):
        from_json(text)
