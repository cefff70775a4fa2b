"""Which replies of Flower's clients count in a round. No client ends a round, or has more than its share of it.

**Left out**, as if the client had not replied: an error; records that are not one of metrics and, in training, one of
arrays; a weight that is no number above 0 and within 1e300; where the strategy needs it, no norm bit of 0 or 1; a
metric that more than half of the replies have, missing or in another form.

**Metrics** are averaged if more than half of the replies have them in one form: as a number within 1e300, or as a list
of as many such numbers. All others, NaN too, are removed. So what half of the clients or fewer send does not leave out
others, whoever replies first. Of two replies, the metrics count that both have.

**Names of records** decide nothing. All replies get the most common ones, of equally common ones the first.

**Shares.** A weight counts as at most 10 times the median, of two the lower one. So honest clients of similar weights
count, however large the weight is that another sends. If clients must count alike, all weights count as the median.

**Means** are computed in float64 and rounded once. Integers are the median, each number by itself.

**Arrays.** NumPy reads the header alone, which says what it wants. Nothing is allocated before the shape, the kind of
the dtype and the number of bytes are known to be those of the array that was sent.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from logging import WARNING
from statistics import median_low
from typing import Any

import numpy as np

from gradclip._src.backends.imported import needed_for
from gradclip._src.updates.files import numpy_files
from gradclip._src.updates.files.stored import shown

with needed_for("flower"):
    from flwr.app import Array, ArrayRecord, Message, MetricRecord
    from flwr.common.constant import SType
    from flwr.supercore import log

_LARGEST = 1e300
_MOST = 10
"""How many times the median a weight may count."""
_NUMBER = -1
"""The form of a metric that is one number. That of a list is its length."""
Aggregated = tuple[ArrayRecord | None, MetricRecord | None]


class RefusedError(ValueError):
    """Why a reply or an update does not count."""


class Wrapper:
    """A wrapper of a strategy that remembers what was sent, and leaves out replies that make no mean.

    Attributes:
        num_refused: how many replies were left out or counted as zero so far, in training and evaluation. Errors of
            clients are not among them.
    """

    num_refused = 0
    current_arrays: ArrayRecord
    strategy: Any

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Aggregate what clients evaluated. A reply that makes no mean is left out, as in training."""
        kept = self._kept(replies, task="aggregate_evaluate")
        found: MetricRecord | None = self.strategy.aggregate_evaluate(server_round, kept) if kept else None
        return found

    def _kept(self, replies: Iterable[Message], **needs: Any) -> list[Message]:
        kept, refused = counted(replies, self._weighted_by, **needs)
        self.num_refused += refused
        return kept

    @property
    def _weighted_by(self) -> str | None:
        return getattr(self.strategy, "weighted_by_key", None)

    def _sent(self) -> dict[str, np.ndarray]:
        return dict(zip(self.current_arrays.keys(), self.current_arrays.to_numpy_ndarrays(), strict=True))


def counted(
    replies: Iterable[Message], weighted_by: str | None, *, task: str, bit: str | None = None, alike: bool = False
) -> tuple[list[Message], int]:
    """Return the replies that count, with metrics in one form, and how many were refused. Each is logged.

    Args:
        replies: what clients answered. Their metrics, and the names of their records, are changed.
        weighted_by: the name of the metric that is the weight; None if there is none.
        task: "aggregate_train", or "aggregate_evaluate", for which replies need no arrays.
        bit: the name of a metric that must be 0 or 1; None if there is none.
        alike: whether all weights must be equal, as Flower's accounting asks.
    """
    kinds = ("array_records", "metric_records") if task == "aggregate_train" else ("metric_records",)
    answered = [reply for reply in replies if not (reply.has_error() and _left_out(task, reply, "it is an error"))]
    problems = [_problem(reply, kinds, weighted_by, bit) for reply in answered]
    kept = [reply for reply, why in zip(answered, problems, strict=True) if not (why and _left_out(task, reply, why))]
    kept = _of_usual_metrics(kept, task)
    _name_alike(kept, kinds)
    if weighted_by is not None:
        _bound_weights(kept, weighted_by, task, alike=alike)
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
        header = numpy_files.header_of(array.data[: numpy_files.LONGEST])
    except (ValueError, MemoryError) as error:
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


def _left_out(task: str, reply: Message, reason: str) -> bool:
    log(WARNING, "%s: the reply of node %d is left out: %s.", task, reply.metadata.src_node_id, reason)
    return True


def _problem(reply: Message, kinds: tuple[str, ...], weighted_by: str | None, bit: str | None) -> str | None:
    """Return what is wrong with a reply whatever the others are."""
    numbers = {kind: len(getattr(reply.content, kind)) for kind in kinds}
    if set(numbers.values()) != {1}:
        return f"it must have one record of each kind, and has {numbers}"
    metrics = metrics_of(reply)
    if weighted_by is not None:
        weight: Any = metrics.get(weighted_by)
        if _form(weight) != _NUMBER or weight <= 0:
            return f"its weight, {weighted_by!r}, must be a number above 0 and at most 1e300, got {_told(weight)}"
    if bit is not None and (_form(metrics.get(bit)) != _NUMBER or metrics[bit] not in (0, 1)):
        return f"its {bit!r} must be 0 or 1, got {_told(metrics.get(bit))}. Have all clients use adaptiveclipping_mod"
    return None


def _form(metric: Any) -> int | None:
    """Return the length of a list of numbers, _NUMBER for one, None for what makes no mean."""
    numbers = metric if isinstance(metric, list) else [metric]
    if not all(isinstance(x, int | float) and not isinstance(x, bool) and abs(x) <= _LARGEST for x in numbers):
        return None
    return len(metric) if isinstance(metric, list) else _NUMBER


def _told(metric: Any) -> str:
    if isinstance(metric, list):
        return f"a list of {len(metric)}"
    return "a number beyond 1e300" if isinstance(metric, int) and _form(metric) is None else shown(metric)


def _of_usual_metrics(replies: list[Message], task: str) -> list[Message]:
    """Return the replies that have all metrics that most have, without other metrics."""
    forms = [{name: _form(x) for name, x in metrics_of(reply).items()} for reply in replies]
    found = Counter(one for each in forms for one in each.items())
    usual = {name: form for (name, form), n in found.items() if form is not None and 2 * n > len(replies)}
    others = {name for name, _ in found} - set(usual)
    if others:
        told = "%s: no mean is made of metrics that most replies do not have as numbers in one form: %s."
        log(WARNING, told, task, shown(", ".join(sorted(others))))
    kept = []
    for reply, own in zip(replies, forms, strict=True):
        metrics = metrics_of(reply)
        wrong = next((name for name, form in usual.items() if own.get(name) != form), None)
        if wrong is not None:
            value = _told(metrics.get(wrong, "missing"))
            _left_out(task, reply, f"its metric {shown(wrong)} is {value}, unlike that of most")
            continue
        for name in others.intersection(own):
            del metrics[name]
        kept.append(reply)
    return kept


def _name_alike(replies: list[Message], kinds: tuple[str, ...]) -> None:
    """Give the only records of each kind the names that are most common."""
    names = [tuple(next(iter(getattr(reply.content, kind))) for kind in kinds) for reply in replies]
    usual = next((one for one, _ in Counter(names).most_common(1)), ())
    for reply, own in zip(replies, names, strict=True):
        if own != usual:
            reply.content.update(zip(usual, [reply.content.pop(name) for name in own], strict=True))


def _bound_weights(replies: list[Message], key: str, task: str, *, alike: bool) -> None:
    """Bound the weights, or make them alike."""
    usual = median_low([float(metrics_of(reply)[key]) for reply in replies] or [0])
    least, most = (usual, usual) if alike else (0, _MOST * usual)
    for reply in replies:
        metrics, node = metrics_of(reply), reply.metadata.src_node_id
        if not least <= metrics[key] <= most:
            log(WARNING, "%s: the weight of node %d, %g, counts as %g.", task, node, metrics[key], most)
            metrics[key] = most


def in_float64(keys: Iterable[str], arrays: Iterable[Any]) -> ArrayRecord:
    """Return arrays in float64, so that their mean is rounded once, at the end."""
    return ArrayRecord({key: Array(_wide(np.asarray(x))) for key, x in zip(keys, arrays, strict=True)})


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.result_type(array, np.float64), copy=False) if array.dtype.kind in "fc" else array


def rounded(mean: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Return whole numbers of a dtype; those beyond its range become its largest or smallest."""
    whole: Any = np.rint(mean)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if whole.dtype.kind == "f":
            return np.where(
                whole >= limits.max, limits.max, np.where(whole <= limits.min, limits.min, whole).astype(dtype)
            )
        whole = np.clip(whole, limits.min, limits.max)
    return np.asarray(whole).astype(dtype)


def share_medians(replies: list[Message], sent: Mapping[str, np.ndarray]) -> None:
    """Give all replies the median of their integers, which no few clients move far."""
    records = [next(iter(reply.content.array_records.values())) for reply in replies]
    for key in (key for key, old in sent.items() if old.dtype.kind not in "fc"):
        middle = np.sort([record[key].numpy() for record in records], axis=0)[(len(records) - 1) // 2]
        for record in records:
            record[key] = Array(np.asarray(middle))
