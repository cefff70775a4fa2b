"""What hostile clients make of a reply. Each function changes one; one that returns a message replaces it."""

import math
import pickle

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord

from federation import record
from wrapped import OLD

WEIGHT = "num-examples"


def header(text, data=b"", version=b"\x01\x00"):
    return b"\x93NUMPY" + version + len(text).to_bytes(2, "little") + text.encode() + data


def described(dtype, shape, data=b""):
    return header(repr({"descr": dtype, "fortran_order": False, "shape": shape}), data)


# What may be sent instead of the two float32 numbers of "w".
JUNK = {
    "junk bytes": Array("float32", (2,), "numpy.ndarray", b"junk"),
    "nothing": Array("float32", (2,), "numpy.ndarray", b""),
    "a pickle": Array("float32", (2,), "numpy.ndarray", pickle.dumps([1.0, 2.0])),
    "an unknown type": Array("float32", (2,), "torch.tensor", Array(OLD["w"]).data),
    "373 GiB": Array("float32", (2,), "numpy.ndarray", described("<f4", (10**11,))),
    "more than is there": Array("float32", (2,), "numpy.ndarray", described("<f4", (2,), b"1234")),
    "less than is there": Array("float32", (2,), "numpy.ndarray", described("<f4", (2,), b"12345678" + b"9")),
    "objects": Array("object", (2,), "numpy.ndarray", described("|O", (2,), b"12345678")),
    "numbers of 2 GiB": Array("float32", (2,), "numpy.ndarray", described(f"|V{2**31 - 1}", (2,))),
    "a damaged header": Array("float32", (2,), "numpy.ndarray", header("{'descr': ")),
    "integers": Array(np.array([10**9, 10**9])),
    "text": Array(np.array(["1", "2"])),
    "another shape": Array(np.zeros((2, 1), np.float32)),
}


def with_metric(name, value):
    """Send a metric, of any type: other programs than Flower's may send what its records refuse."""

    def change(reply):
        for metrics in reply.content.metric_records.values():
            metrics.__dict__["_data"][name] = value

    return change


def without_metric(name):
    def change(reply):
        for metrics in reply.content.metric_records.values():
            metrics.pop(name, None)

    return change


def two_of(kind):
    def change(reply):
        own = [one for one in reply.content.values() if isinstance(one, kind)]
        reply.content["more"] = own[0].copy() if own else kind({})

    return change


def none_of(kind):
    def change(reply):
        for key in [key for key, one in reply.content.items() if isinstance(one, kind)]:
            del reply.content[key]

    return change


def renamed(kept, new="other"):
    def change(reply):
        if kept in reply.content:
            reply.content[new] = reply.content.pop(kept)

    return change


def swapped(reply):
    """Name the arrays "metrics" and the metrics "arrays"."""
    found = {{"metrics": "arrays", "arrays": "metrics"}.get(key, key): one for key, one in reply.content.items()}
    reply.content.clear()
    reply.content.update(found)


def behind_settings(reply):
    """Have a record of settings under the name that the metrics of others have."""
    renamed("metrics")(reply)
    reply.content["metrics"] = ConfigRecord({"num-examples": "many"})


def failed(reply):
    asked = Message(reply.content, dst_node_id=reply.metadata.src_node_id, message_type="train")
    return Message(Error(code=0, reason="no data"), reply_to=asked)


def unmoved(reply):
    for key in list(reply.content.array_records):
        reply.content[key] = record(OLD)


# Replies that make no mean, whatever the others are.
BROKEN = {
    "an error": failed,
    "a weight of 0": with_metric(WEIGHT, 0),
    "a weight of -1": with_metric(WEIGHT, -1),
    "a weight of NaN": with_metric(WEIGHT, math.nan),
    "an infinite weight": with_metric(WEIGHT, math.inf),
    "a weight beyond float64": with_metric(WEIGHT, 10**400),
    "a weight beyond what Python prints": with_metric(WEIGHT, 10**5000),
    "a list as weight": with_metric(WEIGHT, [1, 2]),
    "text as weight": with_metric(WEIGHT, "1"),
    "no weight": without_metric(WEIGHT),
    "two records of metrics": two_of(MetricRecord),
    "no metrics": none_of(MetricRecord),
}
BROKEN_ARRAYS = {"two records of arrays": two_of(ArrayRecord), "no arrays": none_of(ArrayRecord)}
# Metrics unlike those of most. Between two replies there is no majority: the metric counts for neither.
UNLIKE = {
    "no loss": without_metric("loss"),
    "a loss of NaN": with_metric("loss", math.nan),
    "an infinite loss": with_metric("loss", -math.inf),
    "a loss beyond float64": with_metric("loss", 10**400),
    "a list as loss": with_metric("loss", [1.0]),
    "an empty list as loss": with_metric("loss", []),
    "text as loss": with_metric("loss", "low"),
}
# What does not matter.
HARMLESS = {
    "one more metric": with_metric("extra", 1.0),
    "one more list": with_metric("extra", [1, 2, 3]),
    "one more metric beyond float64": with_metric("extra", 10**400),
    "one more metric with an odd name": with_metric("\ud800\n%s" * 1000, math.nan),
    "other names of metrics": renamed("metrics"),
}
HARMLESS_ARRAYS = {
    "other names of arrays": renamed("arrays"),
    "names the other way round": swapped,
    "settings under the usual name": behind_settings,
}
