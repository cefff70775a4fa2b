"""One hostile client in a round: the others count, the mean moves by no more than its share, and the log names it."""

import math
import pickle
import random
import tracemalloc

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord

from federation import InProcess, arrays_of, record
from test_flower_rounds import Accountant
from wrapped import ADAPTIVE, FIXED, OLD, SERVER, average, every_wrapper, mods, moved, wrapper

STEP, CLIENTS = 0.25, 4
on_servers = pytest.mark.parametrize("name", [FIXED[0], ADAPTIVE[0]])


@pytest.fixture(autouse=True)
def _seeded():
    random.seed(0)
    np.random.seed(0)


def hostile_round(name, change, *, hostile=2, clients=CLIENTS, **settings):
    """Return the new parameters, metrics and wrapper after a round in which one reply is changed."""
    wrapped = wrapper(name, clients=clients, **settings)
    grid = InProcess(moved(STEP), clients, mods(name))
    asked = wrapped.configure_train(1, record(OLD), ConfigRecord(), grid)
    replies = grid.send_and_receive(asked)
    place = next(i for i, reply in enumerate(replies) if reply.metadata.src_node_id == hostile)
    replies[place] = change(replies[place]) or replies[place]
    arrays, metrics = wrapped.aggregate_train(1, replies)
    return arrays_of(arrays), metrics, wrapped


def header(text, data=b"", version=b"\x01\x00"):
    return b"\x93NUMPY" + version + len(text).to_bytes(2, "little") + text.encode() + data


def described(dtype, shape, data=b""):
    return header(repr({"descr": dtype, "fortran_order": False, "shape": shape}), data)


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


@every_wrapper
@pytest.mark.parametrize("junk", JUNK)
def test_arrays_that_cannot_be_read_count_as_zero(name, junk, caplog):
    def change(reply):
        reply.content["arrays"]["w"] = JUNK[junk]

    made, _, wrapped = hostile_round(name, change)
    np.testing.assert_allclose(made["w"], OLD["w"] + STEP * 3 / 4, rtol=1e-6)
    assert wrapped.num_refused == 1
    assert "the update of node 2 counts as zero: " in caplog.text


@on_servers
def test_a_declared_size_is_not_allocated(name):
    def change(reply):
        reply.content["arrays"]["w"] = Array("float32", (2,), "numpy.ndarray", described("<f8", (1 << 28,)))

    tracemalloc.start()
    try:
        hostile_round(name, change)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_arrays_in_the_order_of_fortran_and_of_other_bytes_are_read():
    old = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    for sent in (np.asfortranarray(old), old.astype(">f4"), old.astype(np.float64), old.T.copy().T):
        wrapped = wrapper(FIXED[0], clients=2)
        grid = InProcess(lambda arrays, node, sent=sent: {"w": sent}, 2)
        asked = wrapped.configure_train(1, ArrayRecord({"w": Array(old)}), ConfigRecord(), grid)
        made, _ = wrapped.aggregate_train(1, grid.send_and_receive(asked))
        assert arrays_of(made)["w"].tolist() == old.tolist()
        assert wrapped.num_refused == 0


def with_metrics(**changed):
    def change(reply):
        for key, value in changed.items():
            reply.content["metrics"][key.replace("_", "-")] = value

    return change


def two_of(kind):
    def change(reply):
        reply.content["more"] = kind({key: reply.content[kept][key] for key in reply.content[kept]})

    kept = "arrays" if kind is ArrayRecord else "metrics"
    return change


def none_of(kept):
    def change(reply):
        del reply.content[kept]

    return change


def renamed(kept):
    def change(reply):
        reply.content["other"] = reply.content[kept]
        del reply.content[kept]

    return change


def failed(reply):
    return Message(Error(code=0, reason="no data"), reply_to=_asked(reply))


def _asked(reply):
    """Return a message whose answer comes from the node of a reply."""
    return Message(reply.content, dst_node_id=reply.metadata.src_node_id, message_type="train")


LEFT_OUT = {
    "an error": failed,
    "a weight of -1": with_metrics(num_examples=-1),
    "a weight of NaN": with_metrics(num_examples=math.nan),
    "an infinite weight": with_metrics(num_examples=math.inf),
    "a weight beyond float64": with_metrics(num_examples=10**400),
    "a list as weight": with_metrics(num_examples=[1, 2]),
    "one more metric": with_metrics(extra=1.0),
    "a metric beyond float64": with_metrics(extra=10**400),
    "two records of arrays": two_of(ArrayRecord),
    "two records of metrics": two_of(MetricRecord),
    "no arrays": none_of("arrays"),
    "no metrics": none_of("metrics"),
    "other names of arrays": renamed("arrays"),
    "other names of metrics": renamed("metrics"),
}


@every_wrapper
@pytest.mark.parametrize("what", LEFT_OUT)
@pytest.mark.parametrize("hostile", [1, 3])
def test_a_reply_that_makes_no_mean_is_left_out(name, what, hostile, caplog):
    made, metrics, wrapped = hostile_round(name, LEFT_OUT[what], hostile=hostile)
    np.testing.assert_allclose(made["w"], OLD["w"] + STEP, rtol=1e-6)
    assert made["n"] == 11
    assert metrics is not None
    assert wrapped.num_refused == (0 if what == "an error" else 1)
    assert f"the reply of node {hostile} is left out: " in caplog.text
    assert wrapped._num_replies == CLIENTS - 1


@every_wrapper
@pytest.mark.parametrize("weight", [1e6, 1e300, 10**300])
def test_a_weight_counts_as_at_most_ten_times_the_median(name, weight, caplog):
    def change(reply):
        reply.content["metrics"]["num-examples"] = weight
        reply.content["arrays"] = record(OLD)

    made, _, _ = hostile_round(name, change)
    np.testing.assert_allclose(made["w"], OLD["w"] + STEP * 3 / 13, rtol=1e-6)
    assert "the weight of node 2," in caplog.text


@every_wrapper
def test_of_two_weights_the_lower_one_is_the_median(name):
    def change(reply):
        reply.content["metrics"]["num-examples"] = 1e300
        reply.content["arrays"] = record(OLD)

    made, _, _ = hostile_round(name, change, clients=2)
    np.testing.assert_allclose(made["w"], OLD["w"] + STEP / 11, rtol=1e-6)


@every_wrapper
def test_weights_up_to_ten_times_the_median_are_those_of_flower(name):
    made, _, _ = hostile_round(name, with_metrics(num_examples=10))
    np.testing.assert_allclose(made["w"], OLD["w"] + STEP, rtol=1e-6)


@every_wrapper
def test_weights_that_are_all_0_change_nothing(name, caplog):
    wrapped, grid = wrapper(name), InProcess(moved(STEP), CLIENTS, mods(name))
    replies = grid.send_and_receive(wrapped.configure_train(1, record(OLD), ConfigRecord(), grid))
    for reply in replies:
        reply.content["metrics"]["num-examples"] = 0
    assert wrapped.aggregate_train(1, replies) == (None, None)
    assert "all weights are 0" in caplog.text


@every_wrapper
def test_the_integers_of_one_client_do_not_move_those_of_the_mean(name):
    def change(reply):
        reply.content["arrays"]["n"] = Array(np.array(2**62))

    assert hostile_round(name, change)[0]["n"] == 11


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("what", ["an error", "a weight of -1", "one more metric"])
def test_accounted_rounds_go_on_without_the_client(name, what):
    accountant = Accountant()
    _, _, wrapped = hostile_round(name, LEFT_OUT[what], accountant=accountant, noise=1.0)
    assert len(accountant.events) == 1
    assert wrapped._std() == pytest.approx(1.0 / 3, rel=1e-6)


@pytest.mark.parametrize("name", FIXED)
def test_accounted_rounds_leave_out_the_weight_that_is_not_that_of_most(name, caplog):
    accountant = Accountant()
    _, _, wrapped = hostile_round(name, with_metrics(num_examples=7), accountant=accountant, noise=1.0)
    assert (len(accountant.events), wrapped.num_refused) == (1, 1)
    assert "the reply of node 2 is left out: its weight is not 1, that of most" in caplog.text


@pytest.mark.parametrize("name", FIXED)
def test_a_weight_of_0_does_not_end_an_accounted_round_of_two(name):
    accountant = Accountant()
    hostile_round(name, with_metrics(num_examples=0), hostile=1, clients=2, accountant=accountant, noise=1.0)
    assert len(accountant.events) == 1


@pytest.mark.parametrize("name", [n for n in ADAPTIVE if not n.startswith(SERVER)])
def test_a_reply_without_the_bit_is_left_out(name):
    def change(reply):
        del reply.content["metrics"]["norm_bit"]

    made, _, wrapped = hostile_round(name, change, inner=average())
    np.testing.assert_allclose(made["w"], OLD["w"] + STEP, rtol=1e-6)
    assert wrapped.num_refused == 1
