import time

import pytest

from gradclip._src.updates.files import strict_json


def test_json_is_read():
    text = '{"a": [1, 0, 18446744073709551615], "b": {"é": null, "c": [true, 1.5]}}'.encode()
    assert strict_json.parse(text) == {"a": [1, 0, 2**64 - 1], "b": {"é": None, "c": [True, 1.5]}}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"a": 1, "b": 2, "a": 3}', "the name 'a' more than once"),
        (b'{"x": {"a": 1, "\\u0061": 3}}', "the name 'a' more than once"),
        (b"[" * 100_000, "nested too deeply|damaged"),
        (b'{"a": "\xff"}', "not UTF-8: invalid start byte at byte 7"),
        (b'{"\\ud800": 1}', "surrogates"),
        (b'{"a": 1', "damaged: Expecting ',' delimiter at character 7"),
        (b"", "damaged: Expecting value at character 0"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": ' + b"9" * 5000 + b"}", "an integer of 5000 digits"),
        (b"[" + b"1," * 1_000_001 + b"1]", "more than gradclip reads"),
        (b"[" + b"{}," * 300_001 + b"{}]", "more than gradclip reads"),
        (b" " * (strict_json.MOST_BYTES + 1), "more than gradclip reads"),
        (b'{"a\n": 1}', "damaged: Invalid control character"),
    ],
)
def test_other_text_is_refused_in_one_line(text, why):
    with pytest.raises(ValueError, match=why) as found:
        strict_json.parse(text)
    assert "\n" not in str(found.value)


def test_a_repeated_name_is_found_quickly():
    text = ",".join(f'"a{n}":0' for n in range(150_000)) + ',"a149999":1'
    start = time.process_time()
    with pytest.raises(ValueError, match="the name 'a149999' more than once"):
        strict_json.parse(f"{{{text}}}".encode())
    assert time.process_time() - start < 20  # to count each name among all would take minutes


def test_naturals():
    assert strict_json.are_naturals([0, 1, 2**63])
    assert not any(map(strict_json.is_natural, (True, -1, 1.0, "1", None)))
    assert not strict_json.are_naturals({})
    # Rust reads "-0" as a float, which is no size.
    assert not strict_json.are_naturals(strict_json.parse(b"[-0]"))
