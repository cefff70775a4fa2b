"""Drop-in replacements for Flower's clipping: mods for clients, wrappers of strategies for servers. For Flower 1.41.

To switch, import the names from here instead of `flwr.clientapp.mod`, `flwr.serverapp.strategy` or
`flwr.supercore.differential_privacy`. Arguments, messages and keys are Flower's, so a client and a server may switch
one after the other. They are for the API of messages: `ServerApp`, `ClientApp` and `flwr.serverapp.strategy`.

- The norm of the update that the server computes is at most the threshold, by a proof.
- An update with NaN or infinities counts as zero, and is logged. Updates of zeros, 0-d parameters, counters and rounds
  without replies work.
- The adaptive threshold moves toward the quantile. Flower's moves away from it.
- Means and noise are float64 and rounded once.

`CheckedStrategy` is gradclip's own: a wrapper that refuses updates which are too long, instead of clipping them.
"""

from logging import ERROR, WARNING
from typing import Any

import numpy as np

from gradclip._src.backends.imported import needed_for
from gradclip.integrations._flower_checked import CheckedStrategy
from gradclip.integrations._flower_strategies import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)
from gradclip.integrations._flower_updates import (
    ClippedUpdate,
    adaptive_clip_inputs_inplace,
    clip_inputs_inplace,
    clipped_parameters,
    compute_adaptive_clip_model_update,
    compute_clip_model_update,
    get_norm,
)

with needed_for("flower"):
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, MetricRecord
    from flwr.clientapp.typing import ClientAppCallable
    from flwr.common.constant import ErrorCode
    from flwr.supercore import log
    from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM, KEY_NORM_BIT

__all__ = [
    "CheckedStrategy",
    "DifferentialPrivacyClientSideAdaptiveClipping",
    "DifferentialPrivacyClientSideFixedClipping",
    "DifferentialPrivacyServerSideAdaptiveClipping",
    "DifferentialPrivacyServerSideFixedClipping",
    "adaptive_clip_inputs_inplace",
    "adaptiveclipping_mod",
    "clip_inputs_inplace",
    "compute_adaptive_clip_model_update",
    "compute_clip_model_update",
    "fixedclipping_mod",
    "get_norm",
]


def fixedclipping_mod(msg: Message, ctxt: Context, call_next: ClientAppCallable) -> Message:
    """Clip what a client trained, before it is sent, by the threshold that the server sent with its parameters.

    Use it with `DifferentialPrivacyClientSideFixedClipping` on the server, as the last mod that changes parameters. A
    message that does not fit, such as one without a threshold, is answered with an error that says what is missing.
    """
    return _clipped_reply("fixedclipping_mod", msg, ctxt, call_next)


def adaptiveclipping_mod(msg: Message, ctxt: Context, call_next: ClientAppCallable) -> Message:
    """Clip as `fixedclipping_mod` does, and tell the server whether the update was longer than the threshold.

    Use it with `DifferentialPrivacyClientSideAdaptiveClipping` on the server.
    """
    return _clipped_reply("adaptiveclipping_mod", msg, ctxt, call_next, tells=True)


class _MisfitError(Exception):
    """A message that a mod cannot work with."""


def _clipped_reply(
    name: str, msg: Message, ctxt: Context, call_next: ClientAppCallable, *, tells: bool = False
) -> Message:
    if msg.metadata.message_type.partition(".")[0] != MessageType.TRAIN:
        return call_next(msg, ctxt)
    try:
        _, sent = _only(msg, ArrayRecord)
        threshold = _threshold(msg)
    except _MisfitError as error:
        return _refused(name, msg, error)
    reply = call_next(msg, ctxt)
    if reply.has_error():
        return reply
    try:
        key, trained = _only(reply, ArrayRecord)
        metrics = _only(reply, MetricRecord)[1] if tells else {}
        made = _clipped(trained, sent, threshold)
    except _MisfitError as error:
        return _refused(name, msg, error)
    if not made.finite:
        log(WARNING, "%s: the update has NaN or infinities. The parameters are sent back as they came.", name)
    reply.content[key] = ArrayRecord(
        {k: Array(np.asarray(x)) for k, x in zip(trained.keys(), made.parameters, strict=True)}
    )
    if tells:
        metrics[KEY_NORM_BIT] = int(made.clipped)
    return reply


def _only(msg: Message, kind: type[Any]) -> tuple[str, Any]:
    """Return the key and the record of the only record of a kind."""
    found = [(key, record) for key, record in msg.content.items() if isinstance(record, kind)]
    if len(found) != 1:
        raise _MisfitError(f"expects exactly one {kind.__name__}, but found {len(found)}")
    return found[0]


def _threshold(msg: Message) -> float:
    _, config = _only(msg, ConfigRecord)
    found = config.get(KEY_CLIPPING_NORM)
    if isinstance(found, bool) or not isinstance(found, float | int) or not found >= 0:
        raise _MisfitError(
            f"needs a threshold of 0 or more as {KEY_CLIPPING_NORM!r} in the ConfigRecord, got {found!r}. Use "
            "DifferentialPrivacyClientSideFixedClipping or DifferentialPrivacyClientSideAdaptiveClipping on the server"
        )
    return float(found)


def _clipped(trained: ArrayRecord, sent: ArrayRecord, threshold: float) -> ClippedUpdate:
    if list(trained.keys()) != list(sent.keys()):
        raise _MisfitError("expects the keys of the trained arrays to be those of the arrays that the server sent")
    try:
        return clipped_parameters(trained.to_numpy_ndarrays(), sent.to_numpy_ndarrays(), threshold)
    except (TypeError, ValueError) as error:
        raise _MisfitError(f"cannot clip: {error}") from error


def _refused(name: str, msg: Message, error: _MisfitError) -> Message:
    reason = f"{name} {error}"
    log(ERROR, reason)
    return Message(Error(code=ErrorCode.MOD_FAILED_PRECONDITION, reason=reason), reply_to=msg)
