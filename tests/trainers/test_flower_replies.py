"""One hostile client in a round: the others count, the mean moves by no more than its share, and the log names it."""

import random
import tracemalloc

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import Krum

from federation import InProcess, arrays_of, record
from hostile import (
    BROKEN,
    BROKEN_ARRAYS,
    HARMLESS,
    HARMLESS_ARRAYS,
    JUNK,
    UNLIKE,
    WEIGHT,
    described,
    unmoved,
    with_metric,
)
from wrapped import ADAPTIVE, FIXED, OLD, SERVER, Accountant, every_wrapper, mods, moved, wrapper

STEP, CLIENTS = 0.25, 4
two_wrappers = pytest.mark.parametrize("name", [FIXED[0], ADAPTIVE[1]])
on_servers = pytest.mark.parametrize("name", [FIXED[0], ADAPTIVE[0]])


@pytest.fixture(autouse=True)
def _seeded():
    random.seed(0)
    np.random.seed(0)


def hostile_round(name, change, *, hostile=2, clients=CLIENTS, **settings):
    """Return the new parameters, metrics and wrapper after a round in which the reply of one client is changed."""
    wrapped = wrapper(name, clients=CLIENTS, **settings)
    grid = InProcess(moved(STEP), CLIENTS, mods(name))
    asked = wrapped.configure_train(1, record(OLD), ConfigRecord(), grid)
    replies = sorted(grid.send_and_receive(asked), key=lambda reply: reply.metadata.src_node_id)[:clients]
    replies[hostile - 1] = change(replies[hostile - 1]) or replies[hostile - 1]
    arrays, metrics = wrapped.aggregate_train(1, replies)
    return arrays and arrays_of(arrays), metrics, wrapped


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


LEFT_OUT = BROKEN | BROKEN_ARRAYS
KEPT = HARMLESS | HARMLESS_ARRAYS


def and_unmoved(change):
    """Change a reply, which then adds nothing to the mean, if it counts."""

    def both(reply):
        unmoved(reply)
        return change(reply)

    return both


@every_wrapper
@pytest.mark.parametrize("what", LEFT_OUT | UNLIKE)
@pytest.mark.parametrize("hostile", [1, 3, 4])
def test_a_reply_that_makes_no_mean_is_left_out(name, what, hostile, caplog):
    made, metrics, wrapped = hostile_round(name, and_unmoved((LEFT_OUT | UNLIKE)[what]), hostile=hostile)
    np.testing.assert_allclose(made["w"], OLD["w"] + STEP, rtol=1e-6)
    assert made["n"] == 11
    assert metrics["loss"] == pytest.approx((10 - hostile) / 3)
    assert wrapped.num_refused == (0 if what == "an error" else 1)
    assert f"aggregate_train: the reply of node {hostile} is left out: " in caplog.text
    assert wrapped._num_replies == CLIENTS - 1


@every_wrapper
@pytest.mark.parametrize("what", KEPT)
@pytest.mark.parametrize("hostile", [1, 3, 4])
def test_a_reply_with_other_names_or_more_metrics_counts(name, what, hostile):
    made, metrics, wrapped = hostile_round(name, and_unmoved(KEPT[what]), hostile=hostile)
    np.testing.assert_allclose(made["w"], OLD["w"] + STEP * 3 / 4, rtol=1e-6)
    assert {**metrics, "norm_bit": 0} == {"loss": pytest.approx(2.5), "norm_bit": 0}
    assert wrapped.num_refused == 0


@two_wrappers
@pytest.mark.parametrize("what", LEFT_OUT | UNLIKE | KEPT)
@pytest.mark.parametrize("hostile", [1, 2])
def test_of_two_replies_the_honest_one_counts(name, what, hostile):
    made, metrics, _ = hostile_round(name, and_unmoved((LEFT_OUT | UNLIKE | KEPT)[what]), hostile=hostile, clients=2)
    np.testing.assert_allclose(made["w"], OLD["w"] + (STEP if what in LEFT_OUT else STEP / 2), rtol=1e-6)
    known = {} if what in UNLIKE else {"loss": 3 - hostile if what in LEFT_OUT else 1.5}
    assert {key: x for key, x in metrics.items() if key != "norm_bit"} == known


@two_wrappers
@pytest.mark.parametrize("hostile", [(1, 2), (2, 3), (3, 4)])
def test_half_of_the_clients_leave_out_nobody(name, hostile):
    wrapped, grid = wrapper(name), InProcess(moved(STEP), CLIENTS, mods(name))
    replies = grid.send_and_receive(wrapped.configure_train(1, record(OLD), ConfigRecord(), grid))
    replies.sort(key=lambda reply: reply.metadata.src_node_id)
    for node in hostile:
        for change in (unmoved, UNLIKE["no loss"], HARMLESS["one more metric"], HARMLESS["other names of metrics"]):
            change(replies[node - 1])
    arrays, metrics = wrapped.aggregate_train(1, replies)
    np.testing.assert_allclose(arrays_of(arrays)["w"], OLD["w"] + STEP / 2, rtol=1e-6)
    assert (set(metrics) - {"norm_bit"}, wrapped.num_refused) == (set(), 0)


@two_wrappers
@pytest.mark.parametrize("what", LEFT_OUT | UNLIKE | KEPT)
def test_a_hostile_client_alone_ends_no_round(name, what):
    made, metrics, _ = hostile_round(name, (LEFT_OUT | UNLIKE | KEPT)[what], hostile=1, clients=1)
    assert (made is None, metrics is None) == (what in LEFT_OUT, what in LEFT_OUT)


@every_wrapper
@pytest.mark.parametrize("weight", [1e6, 1e300, 10**300])
def test_a_weight_counts_as_at_most_ten_times_the_median(name, weight, caplog):
    def change(reply):
        with_metric(WEIGHT, weight)(reply)
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
    made, _, _ = hostile_round(name, with_metric(WEIGHT, 10))
    np.testing.assert_allclose(made["w"], OLD["w"] + STEP, rtol=1e-6)


@every_wrapper
def test_weights_that_are_all_0_change_nothing(name, caplog):
    wrapped, grid = wrapper(name), InProcess(moved(STEP), CLIENTS, mods(name))
    replies = grid.send_and_receive(wrapped.configure_train(1, record(OLD), ConfigRecord(), grid))
    for reply in replies:
        reply.content["metrics"]["num-examples"] = 0
    assert wrapped.aggregate_train(1, replies) == (None, None)
    assert caplog.text.count("must be a number above 0 and at most 1e300, got 0") == CLIENTS


@every_wrapper
def test_the_integers_of_one_client_do_not_move_those_of_the_mean(name):
    def change(reply):
        reply.content["arrays"]["n"] = Array(np.array(2**62))

    assert hostile_round(name, change)[0]["n"] == 11


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("what", ["an error", "a weight of -1", "no loss"])
def test_accounted_rounds_go_on_without_the_client(name, what):
    accountant = Accountant()
    _, _, wrapped = hostile_round(name, (LEFT_OUT | UNLIKE)[what], accountant=accountant, noise=1.0)
    assert len(accountant.events) == 1
    assert wrapped._std() == pytest.approx(1.0 / 3, rel=1e-6)


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("clients", [2, 3, 4])
@pytest.mark.parametrize("hostile", [1, 2])
@pytest.mark.parametrize("weight", [7, 5e-324, 1e300])
def test_in_accounted_rounds_all_weights_count_alike(name, clients, hostile, weight, caplog):
    accountant = Accountant()
    settings = {"hostile": hostile, "clients": clients, "accountant": accountant, "noise": 1e-9}
    made, _, wrapped = hostile_round(name, and_unmoved(with_metric(WEIGHT, weight)), **settings)
    np.testing.assert_allclose(made["w"], OLD["w"] + STEP * (clients - 1) / clients, rtol=1e-6)
    assert (len(accountant.events), wrapped.num_refused) == (1, 0)
    assert caplog.text.count(" counts as ") == 1


def test_a_client_of_weight_0_does_not_end_a_round_of_a_strategy_that_chooses_among_clients():
    """Krum takes one of the clients that are near to most others, and divides by its weight."""
    krum = Krum(fraction_evaluate=0.0, num_malicious_nodes=1)
    made, _, _ = hostile_round(FIXED[0], with_metric(WEIGHT, 0), hostile=1, inner=krum)
    np.testing.assert_allclose(made["w"], OLD["w"] + STEP, rtol=1e-6)


@pytest.mark.parametrize("name", [n for n in ADAPTIVE if not n.startswith(SERVER)])
@pytest.mark.parametrize("clients", [1, 2, 4])
@pytest.mark.parametrize("bit", [None, 2, -1, [1], "1"])
def test_a_reply_that_does_not_say_whether_it_was_clipped_is_left_out(name, clients, bit, caplog):
    change = with_metric("norm_bit", bit)
    made, _, wrapped = hostile_round(name, and_unmoved(change), hostile=1, clients=clients)
    assert wrapped.num_refused == 1
    assert "its 'norm_bit' must be 0 or 1, got" in caplog.text
    if clients > 1:
        np.testing.assert_allclose(made["w"], OLD["w"] + STEP, rtol=1e-6)
