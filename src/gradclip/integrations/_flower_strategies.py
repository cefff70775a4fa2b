"""Flower's wrappers of strategies for central differential privacy, with gradclip's clipping and float64 noise.

Each client's update is at most C long (`gradclip.integrations._flower_updates`), so with equal weights one of n clients
moves the mean of the parameters by at most C / n. The mean is computed in float64, by the strategy that is wrapped: in
each coordinate a term takes part in at most n + 2 roundings, so the mean of parameters of norm at most ||o|| + C is off
by at most g * (||o|| + C), where o are the parameters that the server sent and g = (n + 2) * u / (1 - (n + 2) * u) with
u = 2**-53. The standard deviation of the noise is noise_multiplier * (C / n + 2 * g * (||o|| + C)), rounded up. Here n
is num_sampled_clients, or the number of replies if fewer clients replied. This is for strategies that average, as
`FedAvg` does, and clients of equal weights: for others a warning is logged.

**What no noise hides.** Arrays of integers and booleans, such as BatchNorm's counters, are not clipped and get no
noise. So with noise they stay as the server sent them. Without noise they are the median, each number by itself.

**What no client can do.** A reply that makes no mean is left out, and an update that cannot be read counts as zero:
`gradclip.integrations._flower_replies`. Both are logged with the node and the reason, and the round goes on.

**The adaptive threshold.** With b the share of updates longer than C, C <- C * exp(rate * (b - target)): if too many
are clipped, C grows. b is 1/2 + (clipped - m / 2 + noise) / n within [0, 1], for m finite updates of n clients. In this
form one client changes the count by 1/2, for which Flower computes the noise. The noise on the mean is for the C by
which updates were clipped. Flower moves C the other way, and takes the noise for the next C.

The method is from Andrew et al. 2021, "Differentially Private Learning with Adaptive Clipping".
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import signature
from logging import INFO, WARNING
from typing import Any

import numpy as np

from gradclip._src.backends.imported import needed_for
from gradclip._src.functional.clip import global_norm
from gradclip._src.private.sums.settings import as_number
from gradclip._src.public import public_in
from gradclip.integrations._flower_replies import (
    Aggregated,
    RefusedError,
    Wrapper,
    arrays_like,
    in_float64,
    metrics_of,
    rounded,
    share_medians,
)
from gradclip.integrations._flower_updates import clipped_parameters

with needed_for("flower"):
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message
    from flwr.serverapp import Grid
    from flwr.serverapp import strategy as theirs
    from flwr.serverapp.strategy.dp_fixed_clipping import validate_replies
    from flwr.supercore import log
    from flwr.supercore.differential_privacy import KEY_NORM_BIT

_SMALLEST, _LARGEST = 1e-300, 1e300
_NUMBERS = (
    "noise_multiplier",
    "clipping_norm",
    "num_sampled_clients",
    "initial_clipping_norm",
    "target_clipped_quantile",
    "clip_norm_lr",
    "clipped_count_stddev",
)


def checked(made_by: Callable[..., None]) -> Callable[..., None]:
    """Return the `__init__` of a strategy with a TypeError for a setting that is no number, a ValueError for NaN."""

    @wraps(made_by)
    def make(self: object, *args: object, **kwargs: object) -> None:
        try:
            given = signature(made_by).bind(self, *args, **kwargs).arguments
        except TypeError:
            given = {}  # the call itself says better what it lacks
        _check_numbers(given)
        made_by(self, *args, **kwargs)

    return make


def _check_numbers(given: Mapping[str, object]) -> None:
    for name in _NUMBERS:
        default = name == "clipped_count_stddev" and given.get(name) is None
        if name in given and not default and math.isnan(as_number(name, given[name])):
            raise ValueError(f"{name} must not be NaN.")


class _Private(Wrapper):
    """What all four wrappers do: clip, and add noise."""

    _num_replies = 1
    noise_multiplier: float
    clipping_norm: float
    num_sampled_clients: int

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Configure the next round of training."""
        self.current_arrays = arrays
        found: Iterable[Message] = super().configure_train(server_round, arrays, config, grid)  # type: ignore[misc]
        return found

    def _counted(self, replies: Iterable[Message], bit: str | None = None) -> list[Message]:
        """Return the replies that count in training. The noise is for as many."""
        alike = getattr(self, "accountant", None) is not None
        kept = self._kept(replies, task="aggregate_train", bit=bit, alike=alike)
        if kept:
            validate_replies(kept, self.num_sampled_clients)  # logs how many replied
            self._note_replies(kept)
        return kept

    def _clip(self, replies: list[Message], max_norm: float) -> tuple[int, int]:
        """Clip the arrays of all replies. Return how many were clipped, and how many are finite."""
        sent = self._sent()
        found = []
        for reply in replies:
            name, record = next(iter(reply.content.array_records.items()))
            clipped, reply.content[name] = self._clipped(record, sent, max_norm, reply.metadata.src_node_id)
            found += [] if clipped is None else [clipped]
        share_medians(replies, sent)
        return sum(found), len(found)

    def _clipped(
        self, record: ArrayRecord, sent: dict[str, np.ndarray], max_norm: float, node: int
    ) -> tuple[bool | None, ArrayRecord]:
        """Return whether an update was clipped, or None if it is refused, and what to add for it."""
        old = list(sent.values())
        try:
            made = clipped_parameters(arrays_like(record, sent), old, max_norm)
            if made.finite:
                return made.clipped, in_float64(sent, made.parameters)
            problem = "it has NaN or infinities"
        except RefusedError as error:
            problem = str(error)
        self.num_refused += 1
        log(WARNING, "aggregate_train: the update of node %d counts as zero: %s.", node, problem)
        return None, in_float64(sent, old)

    def _add_noise_to_aggregated_arrays(self, aggregated: ArrayRecord) -> ArrayRecord:
        std = self._std()
        log(INFO, "aggregate_train: central DP noise with %.4f stdev added", std)
        keys = list(aggregated.keys())
        return ArrayRecord({key: Array(self._noised(key, aggregated[key].numpy(), std)) for key in keys})

    def _noised(self, key: str, mean: np.ndarray, std: float) -> np.ndarray:
        sent = self.current_arrays[key].numpy() if key in self.current_arrays else mean
        if sent.dtype.kind not in "fc":
            return sent if std else rounded(mean, sent.dtype)
        wide = np.asarray(mean, np.result_type(mean, np.float64))
        noise: Any = np.random.normal(0.0, std, mean.shape)
        if wide.dtype.kind == "c":
            noise = noise + 1j * np.random.normal(0.0, std, mean.shape)
        return np.asarray(wide + noise).astype(sent.dtype)

    def _std(self) -> float:
        if not self.noise_multiplier:
            return 0.0
        roundings = (max(self.num_sampled_clients, self._num_replies) + 2) * 2.0**-53
        floats = [x for x in self.current_arrays.to_numpy_ndarrays() if x.dtype.kind in "fc"]
        longest = 1.001 * (float(global_norm(floats)) + self.clipping_norm)
        clients = min(self.num_sampled_clients, self._num_replies)
        moved = self.clipping_norm / clients + 2 * roundings / (1 - roundings) * longest
        return self.noise_multiplier * moved * (1 + 2.0**-50)

    def _note_replies(self, replies: list[Message]) -> None:
        """Note how many replies are averaged. Warn if clients count so differently that the noise does not cover it."""
        self._num_replies, key = len(replies), self._weighted_by
        weights = [] if key is None else [float(metrics_of(reply)[key]) for reply in replies]
        if self.noise_multiplier and weights and max(weights) > min(weights):
            log(
                WARNING,
                "aggregate_train: the noise is for clients of equal weights, but one counts %.3g times the mean. Have "
                "all clients send the same number, and name it in weighted_by_key of the wrapped strategy.",
                max(weights) * len(weights) / sum(weights),
            )


@public_in("integrations.flower")
class DifferentialPrivacyClientSideFixedClipping(_Private, theirs.DifferentialPrivacyClientSideFixedClipping):
    """Sends the threshold to clients, which clip with `fixedclipping_mod`, and adds noise to the mean.

    Arguments and methods are those of Flower's class of this name in `flwr.serverapp.strategy`.
    """

    __init__ = checked(theirs.DifferentialPrivacyClientSideFixedClipping.__init__)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        """Aggregate what clients trained. A round without replies gives (None, None)."""
        return _aggregated(self, server_round, replies, math.inf)


@public_in("integrations.flower")
class DifferentialPrivacyServerSideFixedClipping(_Private, theirs.DifferentialPrivacyServerSideFixedClipping):
    """Clips the update of each client on the server, and adds noise to the mean.

    Arguments and methods are those of Flower's class of this name in `flwr.serverapp.strategy`. An update with NaN or
    infinities, with other arrays, shapes or kinds of dtypes than were sent, or that cannot be read, counts as zero. A
    client that answers with an error, or with records or a weight that make no mean, is left out of the round. A weight
    counts as at most 10 times the median.

    Attributes:
        num_refused: how many such replies there were so far, without errors.
    """

    __init__ = checked(theirs.DifferentialPrivacyServerSideFixedClipping.__init__)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        """Clip and aggregate what clients trained. A round without replies gives (None, None)."""
        return _aggregated(self, server_round, replies, self.clipping_norm)


def _aggregated(wrapper: Any, server_round: int, replies: Iterable[Message], max_norm: float) -> Aggregated:
    """Clip and aggregate replies, with Flower's accounting."""
    event = wrapper._pop_pending_event(server_round)
    kept = wrapper._counted(replies)
    if not kept:
        return None, None
    wrapper._validate_uniform_weights(kept)
    wrapper._clip(kept, max_norm)
    arrays, metrics = wrapper.strategy.aggregate_train(server_round, kept)
    if arrays:
        arrays = wrapper._add_noise_to_aggregated_arrays(arrays)
        wrapper._compose_release(event)
    return arrays, metrics


class _Adaptive(_Private):
    """A threshold that moves toward the quantile."""

    target_clipped_quantile: float
    clip_norm_lr: float
    clipped_count_stddev: float

    def _release(self, server_round: int, replies: list[Message], clipped: int, finite: int) -> Aggregated:
        """Aggregate, add noise for the threshold by which updates were clipped, and then move the threshold."""
        arrays, metrics = self.strategy.aggregate_train(server_round, replies)
        if arrays:
            arrays = self._add_noise_to_aggregated_arrays(arrays)
        self._geometric_update(self._noisy_fraction(clipped, finite))
        return arrays, metrics

    def _noisy_fraction(self, count: int, total: int) -> float:
        noised = count - total / 2 + float(np.random.normal(0.0, self.clipped_count_stddev))
        return min(max(0.5 + noised / self.num_sampled_clients, 0.0), 1.0)

    def _geometric_update(self, clipped_fraction: float) -> None:
        moved = self.clipping_norm * math.exp(self.clip_norm_lr * (clipped_fraction - self.target_clipped_quantile))
        self.clipping_norm = min(max(moved, _SMALLEST), _LARGEST)


@public_in("integrations.flower")
class DifferentialPrivacyServerSideAdaptiveClipping(_Adaptive, theirs.DifferentialPrivacyServerSideAdaptiveClipping):
    """Clips on the server as `DifferentialPrivacyServerSideFixedClipping`, by a threshold that follows a quantile.

    Arguments and methods are those of Flower's class of this name in `flwr.serverapp.strategy`.
    """

    __init__ = checked(theirs.DifferentialPrivacyServerSideAdaptiveClipping.__init__)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        """Clip and aggregate what clients trained. A round without replies gives (None, None)."""
        kept = self._counted(replies)
        return self._release(server_round, kept, *self._clip(kept, self.clipping_norm)) if kept else (None, None)


@public_in("integrations.flower")
class DifferentialPrivacyClientSideAdaptiveClipping(_Adaptive, theirs.DifferentialPrivacyClientSideAdaptiveClipping):
    """Sends the threshold to clients, which clip with `adaptiveclipping_mod`, and moves it by what they answer.

    Arguments and methods are those of Flower's class of this name in `flwr.serverapp.strategy`. A reply that does not
    say whether its update was clipped is left out.
    """

    __init__ = checked(theirs.DifferentialPrivacyClientSideAdaptiveClipping.__init__)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        """Aggregate what clients trained. A round without replies gives (None, None)."""
        kept = self._counted(replies, KEY_NORM_BIT)
        if not kept:
            return None, None
        self._clip(kept, math.inf)
        return self._release(server_round, kept, sum(metrics_of(reply)[KEY_NORM_BIT] == 1 for reply in kept), len(kept))
