"""Which replies of Flower's clients count in a round. No client ends a round, or has more than its share of it.

**Left out**, as if the client had not replied: an error; records that are not one of arrays and one of metrics; a
weight that is no number from 0 to 1e300; names of records or metrics that are not those of most replies. If clients
must count alike, also a weight that is not that of most replies.

**Shares.** A weight counts as at most 10 times the median of the weights above 0, of two the lower one. So honest
clients of similar weights count, however large the weight is that another sends.

Among two replies there is no majority: where their forms differ, the first counts.

**Arrays** are read without NumPy's reader: a header says what it wants. Nothing is allocated before the shape, the kind
of the dtype and the number of bytes are known to be those of the array that was sent.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from logging import WARNING
from statistics import median_low
from typing import Any

import numpy as np

from gradclip.files import npy
from gradclip.files.stored import shown
from gradclip.integrations import needed_for

with needed_for("flower"):
    from flwr.app import Array, ArrayRecord, Message, MetricRecord
    from flwr.common.constant import SType
    from flwr.supercore import log

_LARGEST = 1e300
_MOST = 10
"""How many times the median a weight may count."""


class RefusedError(ValueError):
    """Why a reply or an update does not count."""


def counted(replies: Iterable[Message], weighted_by: str | None, *, alike: bool) -> tuple[list[Message], int]:
    """Return the replies that count, with weights that are bounded, and how many were refused. Each is logged.

    Args:
        replies: what clients answered. Weights above the bound are changed in them.
        weighted_by: the name of the metric that is the weight; None if there is none.
        alike: whether all weights must be equal, as Flower's accounting asks.
    """
    answered = [reply for reply in replies if not (reply.has_error() and _left_out(reply, "it is an error"))]
    formed = [(reply, _problem(reply, weighted_by) or _form(reply)) for reply in answered]
    usual = _most_common(form for _, form in formed if not isinstance(form, str))
    kept = []
    for reply, form in formed:
        if form == usual:
            kept.append(reply)
        else:
            _left_out(reply, form if isinstance(form, str) else f"it has {_told(form)}, and most have {_told(usual)}")
    if weighted_by is not None:
        kept = _of_one_weight(kept, weighted_by) if alike else _of_bounded_weights(kept, weighted_by)
    return kept, len(answered) - len(kept)


def metrics_of(reply: Message) -> MetricRecord:
    """Return the only metrics of a reply that counts."""
    return next(iter(reply.content.metric_records.values()))


def arrays_like(record: ArrayRecord, sent: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Return the arrays of a record, in the order of those that were sent. They may be views of bytes.

    Raises:
        RefusedError: a name, shape or kind of dtype that was not sent, or bytes that are no array.

    """
    if set(record.keys()) != set(sent):
        raise RefusedError("its arrays are not those that were sent")
    return [_array_like(name, record[name], old) for name, old in sent.items()]


def _array_like(name: str, array: Array, old: np.ndarray) -> np.ndarray:
    if array.stype != SType.NUMPY:
        raise RefusedError(f"array {shown(name)} is of the unknown type {shown(array.stype)}")
    try:
        header = npy.header_of(array.data[: npy.LONGEST])
    except ValueError as error:
        raise RefusedError(f"array {shown(name)} cannot be read: {error}") from error
    dtype, shape = header.kind.raw, header.layout.shape
    if (shape, dtype.kind) != (old.shape, old.dtype.kind):
        raise RefusedError(
            f"its arrays are not those that were sent: {shown(name)} is {shown(dtype)} of shape {shown(shape)}"
        )
    if header.size != len(array.data) - header.start:
        raise RefusedError(f"array {shown(name)} promises {header.size} bytes and has {len(array.data) - header.start}")
    flat = np.frombuffer(array.data, dtype, header.layout.size, header.start)
    return flat.reshape(shape, order="C" if header.layout == type(header.layout).c_order(shape) else "F")


def _left_out(reply: Message, reason: str) -> bool:
    log(WARNING, "aggregate_train: the reply of node %d is left out: %s.", reply.metadata.src_node_id, reason)
    return True


def _problem(reply: Message, weighted_by: str | None) -> str | None:
    """Return what is wrong with a reply whatever the others are."""
    arrays, metrics = len(reply.content.array_records), len(reply.content.metric_records)
    if (arrays, metrics) != (1, 1):
        return f"it has {arrays} ArrayRecords and {metrics} MetricRecords, not one of each"
    if weighted_by is not None:
        weight = metrics_of(reply).get(weighted_by)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= _LARGEST:
            return f"its weight, {weighted_by!r}, must be a number from 0 to 1e300, got {shown(weight)}"
    numbers = [y for x in metrics_of(reply).values() for y in (x if isinstance(x, list) else [x])]
    return "it has a metric beyond 1e300" if any(isinstance(x, int) and abs(x) > _LARGEST for x in numbers) else None


def _form(reply: Message) -> tuple[Any, ...]:
    """Return what must agree with the other replies, for a mean to be made of them."""
    lengths = {name: len(x) if isinstance(x, list) else None for name, x in metrics_of(reply).items()}
    return next(iter(reply.content.array_records)), next(iter(reply.content.metric_records)), frozenset(lengths.items())


def _told(form: Any) -> str:
    arrays, metrics, names = form
    return shown(f"{arrays!r}, and {metrics!r} with {sorted(name for name, _ in names)}")


def _most_common(found: Iterable[Any]) -> Any:
    return next((one for one, _ in Counter(found).most_common(1)), None)


def _of_one_weight(replies: list[Message], key: str) -> list[Message]:
    """Return replies without those whose weight is 0, or differs from that of half or more."""
    replies = [one for one in replies if metrics_of(one)[key] > 0 or _left_out(one, "its weight is 0")]
    weights = [float(metrics_of(reply)[key]) for reply in replies]
    usual = _most_common(weights)
    if 2 * weights.count(usual) < len(weights):
        return replies
    pairs = list(zip(replies, weights, strict=True))
    why = f"its weight is not {usual:g}, that of most"
    return [reply for reply, weight in pairs if not (weight != usual and _left_out(reply, why))]


def _of_bounded_weights(replies: list[Message], key: str) -> list[Message]:
    """Lower weights that are too large. Return no replies if all weights are 0."""
    above = [metrics_of(reply)[key] for reply in replies if metrics_of(reply)[key]]
    if not above:
        return [reply for reply in replies if not _left_out(reply, "all weights are 0")]
    most = _MOST * median_low(map(float, above))
    for reply in replies:
        metrics, node = metrics_of(reply), reply.metadata.src_node_id
        if metrics[key] > most:
            told = "aggregate_train: the weight of node %d, %g, counts as %g, %d times the median."
            log(WARNING, told, node, metrics[key], most, _MOST)
            metrics[key] = most
    return replies
