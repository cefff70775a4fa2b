"""A wrapper of Flower's strategies that refuses updates instead of clipping them."""

from collections.abc import Iterable
from logging import INFO, WARNING

import numpy as np

from gradclip._src.annotations import Threshold
from gradclip._src.backends.imported import needed_for
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.functional.norm_at_most import known_threshold
from gradclip._src.public import public_in
from gradclip._src.updates.update import check_update
from gradclip.integrations._flower_replies import (
    Aggregated,
    RefusedError,
    Wrapper,
    arrays_like,
    in_float64,
    rounded,
    share_medians,
)

with needed_for("flower"):
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message
    from flwr.serverapp import Grid
    from flwr.serverapp import strategy as theirs
    from flwr.supercore import log


@public_in("integrations.flower")
class CheckedStrategy(Wrapper, theirs.Strategy):
    """Leaves a client out of the round if `gradclip.check_update` refuses its update, and logs why.

    An update is what the client sent minus what the server sent. It is refused if its norm is larger than `max_norm`,
    if it holds NaN or infinities, if its arrays are not those that were sent, or if it cannot be read. Updates that
    clients clip by `fixedclipping_mod` with the same threshold are accepted. Replies that make no mean are left out
    and weights are bounded as by `DifferentialPrivacyServerSideFixedClipping`. Integers are the median of those sent.

    To add noise, wrap the wrapper: `CheckedStrategy(DifferentialPrivacyClientSideFixedClipping(...), max_norm)`. The
    other way round, the noise would be for the clients that are left out, too, and so too small.

    Args:
        strategy: the strategy to wrap, such as `FedAvg`.
        max_norm: the largest norm to accept. With `math.inf`, any finite update is.

    Attributes:
        num_refused: how many replies were left out so far, in training and evaluation. Errors are not among them.
        norms: the norm of each update that could be read so far, refused or not. Some may be NaN or infinite.

    Raises:
        ValueError: a threshold that is negative or NaN.
        TypeError: a threshold that is no number.
    """

    def __init__(self, strategy: theirs.Strategy, max_norm: Threshold) -> None:
        known_threshold(max_norm)
        self.strategy, self.max_norm = strategy, max_norm
        self.norms: list[float] = []

    def __repr__(self) -> str:
        return f"CheckedStrategy({type(self.strategy).__name__}, max_norm={self.max_norm}, {self.num_refused} refused)"

    def summary(self) -> None:
        """Log the settings."""
        log(INFO, "\t├──> Updates with a norm above %s are refused", self.max_norm)
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Configure the next round of training."""
        self.current_arrays = arrays
        return self.strategy.configure_train(server_round, arrays, config, grid)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Configure the next round of evaluation."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        """Aggregate the updates that are accepted. A round without any gives (None, None)."""
        sent = self._sent()
        kept = self._kept(replies, task="aggregate_train")
        accepted = [reply for reply in kept if self._accepts(reply, sent)]
        self.num_refused += len(kept) - len(accepted)
        if not accepted:
            return None, None
        share_medians(accepted, sent)
        arrays, metrics = self.strategy.aggregate_train(server_round, accepted)
        return arrays and _like(sent, arrays), metrics

    def _accepts(self, reply: Message, sent: dict[str, np.ndarray]) -> bool:
        """Say whether an update is accepted. Its arrays are then in float64, so that their mean is rounded once."""
        name, record = next(iter(reply.content.array_records.items()))
        try:
            trained = dict(zip(sent, arrays_like(record, sent), strict=True))
            checked = check_update(_difference(trained, sent), self.max_norm)
            self.norms.append(checked.norm)
            problem = checked.reason
            if checked:
                reply.content[name] = in_float64(trained, trained.values())
                return True
        except RefusedError as error:
            problem = f"{error}."
        log(WARNING, "aggregate_train: the update of node %d is refused: %s", reply.metadata.src_node_id, problem)
        return False


@with_subnormals
def _difference(trained: dict[str, np.ndarray], sent: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the update in float64, and integers as they came."""
    with np.errstate(over="ignore", invalid="ignore"):
        return {
            key: np.subtract(new, sent[key], dtype=np.result_type(new, sent[key], np.float64))
            if new.dtype.kind in "fc"
            else new
            for key, new in trained.items()
        }


def _like(sent: dict[str, np.ndarray], arrays: ArrayRecord) -> ArrayRecord:
    """Return arrays in the dtypes that were sent."""
    return ArrayRecord({key: Array(_cast(x.numpy(), sent[key].dtype)) for key, x in arrays.items()})


def _cast(mean: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.asarray(mean.astype(dtype) if dtype.kind in "fc" else rounded(mean, dtype))
