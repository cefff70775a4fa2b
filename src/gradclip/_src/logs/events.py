"""TensorBoard's event files: messages and checksums are those of the package tensorboard. It needs no TensorFlow."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gradclip._src.logs.files import opened, portion
from gradclip._src.logs.json_files import no_norm
from gradclip._src.logs.rows import Keys, Log, LogError, Row, bounded, lowered, norm_or_nan

_HEAD = 12  # bytes: the length and its checksum
_LARGEST_RECORD = 2**28
_LARGEST_CHECKED = 2**16  # images and graphs hold no norms, and checksums in Python are slow
_VERSION = b"brain.Event:"  # in the first record of every file
_START = 64


class Scalar(NamedTuple):
    """A number that was logged: its tag and step."""

    tag: str
    step: int
    value: float


def is_event_file(start: bytes) -> bool:
    """Say whether a file starts with the record that names the version of event files."""
    return _VERSION in start[:_START]


def of_events(paths: Sequence[Path], key: str | None) -> Log:
    """Read event files of one run."""
    cut: list[Path] = []
    tags = Counter(scalar.tag for path in paths for scalar in _scalars(path, cut))
    keys = Keys.among(tags, key)
    if keys is None:
        if cut and not tags:
            raise LogError(f"{cut[0]} is cut off or damaged before its first number.")
        raise no_norm(paths[0], tags, key)
    # Read again instead of keeping all numbers: there may be many tags.
    cut.clear()
    wanted = (keys.norm, keys.loss, keys.max_norm, keys.clipped)
    every = (scalar for path in paths for scalar in _scalars(path, cut) if scalar.tag in wanted)
    scalars = list(bounded(every))
    losses = {scalar.step: scalar.value for scalar in scalars if scalar.tag == keys.loss}
    thresholds = {scalar.step: scalar.value for scalar in scalars if scalar.tag == keys.max_norm}
    after = {scalar.step: scalar.value for scalar in scalars if scalar.tag == keys.clipped}
    norms = [scalar for scalar in scalars if scalar.tag == keys.norm]
    for one in norms:
        threshold = lowered(one.value, after.get(one.step))
        if threshold is not None:
            thresholds.setdefault(one.step, threshold)
    rows = [
        Row(one.step, norm_or_nan(one.value), losses.get(one.step, math.nan), thresholds.get(one.step, math.nan))
        for one in norms
    ]
    notes = tuple(f"{path.name} is cut off or damaged: what could be read of it is used." for path in cut)
    return Log(f"TensorBoard, {keys.norm}", rows, notes=(*notes, *keys.choice(tags)))


def _scalars(path: Path, cut: list[Path]) -> Iterator[Scalar]:
    for event in _events(path, cut):
        for value in event.summary.value:
            number = _number(value)
            if number is not None:
                yield Scalar(value.tag, max(event.step, 0), number)


def _events(path: Path, cut: list[Path]) -> Iterator[Any]:
    """Yield the events of a file, and add it to `cut` where it is damaged. What follows is then not read."""
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
    except Exception as error:  # also what a version of protobuf raises that does not fit
        raise LogError(f"{path} is TensorBoard's. To read it, run: pip install tensorboard. ({error})") from error
    with opened(path) as file:
        while head := portion(file, _HEAD, path):
            length = int.from_bytes(head[:8], "little")
            data, tail = portion(file, min(length, _LARGEST_RECORD), path), portion(file, 4, path)
            small = length <= _LARGEST_CHECKED
            whole = masked_crc32c(head[:8]).to_bytes(4, "little") == head[8:] and len(data) == length and len(tail) == 4
            if not whole or (small and masked_crc32c(data).to_bytes(4, "little") != tail):
                cut.append(path)
                return
            try:
                if small:
                    yield Event.FromString(data)
            except DecodeError:
                pass  # its checksum is right: it is of no known kind


def _number(value: Any) -> float | None:
    """Return what PyTorch writes as a simple value, and TensorFlow as a tensor; None for what is no number."""
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not value.HasField("tensor") or any(side.size != 1 for side in value.tensor.tensor_shape.dim):
        return None
    from tensorboard.util.tensor_util import make_ndarray

    try:
        held = make_ndarray(value.tensor)
    except (OverflowError, TypeError, ValueError):
        return None
    return float(held.reshape(())) if held.size == 1 and held.dtype.kind == "f" else None
