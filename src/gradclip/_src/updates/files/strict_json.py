"""JSON from files that others wrote: with limits, and without what readers understand differently."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

from gradclip._src.updates.files.stored import shown

MOST_BYTES = 1 << 24
_MOST_CONTAINERS = 300_000  # three for each array; one takes at least 56 bytes
_MOST_COMMAS = 1_000_000


def parse(text: bytes) -> object:
    """Return the value. Raises ValueError, which says what is wrong."""
    containers = text.count(b"{") + text.count(b"[")
    if len(text) > MOST_BYTES or containers > _MOST_CONTAINERS or text.count(b",") > _MOST_COMMAS:
        raise ValueError(
            f"its JSON has {len(text)} bytes and {containers} objects and lists, more than gradclip reads."
        )
    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_without_repeats,
            parse_int=_natural,
            parse_constant=_no_number,
        )
    except RecursionError:
        raise ValueError("its JSON is nested too deeply.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"its JSON is not UTF-8: {error.reason} at byte {error.start}.") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"its JSON is damaged: {error.msg} at character {error.pos}.") from None
    return value


def is_natural(value: object) -> bool:
    """Say whether a value is an integer >= 0. Python takes True for 1; the files here do not."""
    return type(value) is int and value >= 0


def are_naturals(value: object) -> bool:
    """Say whether a value is a list of integers >= 0."""
    return isinstance(value, list) and all(map(is_natural, value))


def _without_repeats(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        times = Counter(name for name, _ in pairs)
        repeated = next(name for name in found if times[name] > 1)
        raise ValueError(f"its JSON has the name '{shown(repeated)}' more than once.")
    for name in found:
        if not name.isascii():
            name.encode()  # lone surrogates, which are no text, raise UnicodeEncodeError
    return found


def _natural(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"its JSON has an integer of {len(digits)} digits.")
    # Libraries in other languages read "-0" as a float.
    return -1 if digits.startswith("-") else int(digits)


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"its JSON has {word}, which is no JSON.")


_MOST_DIGITS = 20  # of 2**64
