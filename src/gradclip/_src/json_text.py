"""JSON that gradclip writes and reads again: a reader in any language takes it for the same values.

NaN and infinities are the strings "nan", "inf", "-inf". Other readers differ on purpose. Logs of others hold NaN as
Python spells it, and are read as far as they are whole (`logs/json_files.py`). Files of arrays may be hostile, so what
they promise has limits (`updates/files`). Processes of one run read what they wrote themselves (`guard/ranks.py`).
"""

import json
import math
from typing import Any, NoReturn


def to_json(value: object, digits: int = 17, *, indent: int | None = None) -> str:
    """Return dicts, lists, tuples, numbers and strings as JSON. Floats are rounded to some digits; 17 keep them."""
    return json.dumps(_plain(value, digits), indent=indent, allow_nan=False)


def from_json(text: str | bytes) -> Any:
    """Return an object that `to_json` wrote. Raises ValueError for constants that JSON lacks, and repeated names."""
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deeply.") from None


def _plain(value: object, digits: int) -> object:
    if isinstance(value, dict):
        return {key: _plain(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, digits) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else str(float(value))
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON. Write it as a string.")


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = {name: _restored(value) for name, value in pairs}
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in an object.")
    return found


def _restored(value: object) -> object:
    if isinstance(value, list):
        return list(map(_restored, value))
    return float(value) if value in ("nan", "inf", "-inf") else value
