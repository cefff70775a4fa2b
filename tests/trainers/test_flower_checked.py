"""A strategy that refuses updates: the others count, the log says why, and the norms show which bound to take."""

import math

import numpy as np
import pytest
from flwr.app import Array, ConfigRecord
from flwr.serverapp import strategy as theirs

from federation import InProcess, arrays_of, record
from gradclip.integrations.flower import (
    CheckedStrategy,
    DifferentialPrivacyClientSideFixedClipping,
    fixedclipping_mod,
)
from hostile import JUNK
from wrapped import OLD, average, moved

STEP = 0.25
LENGTH = STEP * math.sqrt(3)


def round_of(max_norm, train, *, clients=4, change=None, inner=None, mods=()):
    wrapped = CheckedStrategy(inner or average(), max_norm)
    grid = InProcess(train, clients, mods)
    replies = list(grid.send_and_receive(wrapped.configure_train(1, record(OLD), ConfigRecord(), grid)))
    for reply in replies:
        if change and reply.metadata.src_node_id == 2:
            change(reply)
    arrays, metrics = wrapped.aggregate_train(1, replies)
    return arrays and arrays_of(arrays), metrics, wrapped


def test_a_client_that_moves_too_far_is_left_out(caplog):
    made, metrics, wrapped = round_of(1.0, moved(lambda node: 100.0 if node == 2 else STEP))
    np.testing.assert_allclose(made["w"], OLD["w"] + STEP, rtol=1e-6)
    assert metrics["loss"] == pytest.approx((1 + 3 + 4) / 3)
    assert wrapped.num_refused == 1
    assert sorted(wrapped.norms) == pytest.approx([LENGTH] * 3 + [100 * math.sqrt(3)])
    assert "the update of node 2 is refused: The norm 173.205081 is larger than 1 by 172; " in caplog.text


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        ({"w": np.array([math.nan, 0], np.float32)}, "['w'] holds 1 NaN and 0 infinite of its 2 numbers."),
        ({"w": np.array([10**6, 10**6])}, "its arrays are not those that were sent: w is int64 of shape"),
        ({"other": OLD["w"]}, "its arrays are not those that were sent."),
        ({"w": np.array([1e308, -1e308])}, "is larger than 1 by 1.41e+308"),
    ],
)
def test_why_an_update_is_refused(sent, reason, caplog):
    made, _, wrapped = round_of(
        1.0, lambda arrays, node: {**arrays, **sent} if node == 2 else moved(STEP)(arrays, node)
    )
    np.testing.assert_allclose(made["w"], OLD["w"] + STEP, rtol=1e-6)
    assert wrapped.num_refused == 1
    assert "the update of node 2 is refused: " in caplog.text
    assert reason in caplog.text


@pytest.mark.parametrize("junk", JUNK)
def test_arrays_that_cannot_be_read_are_refused(junk, caplog):
    def change(reply):
        reply.content["arrays"]["w"] = JUNK[junk]

    made, _, wrapped = round_of(1.0, moved(STEP), change=change)
    np.testing.assert_allclose(made["w"], OLD["w"] + STEP, rtol=1e-6)
    assert (wrapped.num_refused, len(wrapped.norms)) == (1, 3)
    assert "the update of node 2 is refused: " in caplog.text


def test_integers_of_one_client_move_nothing():
    def change(reply):
        reply.content["arrays"]["n"] = Array(np.array(2**62))

    made, _, _ = round_of(1.0, moved(STEP), change=change)
    assert made["n"] == 11


def test_arrays_keep_their_dtypes_and_shapes():
    made, _, _ = round_of(
        math.inf,
        lambda arrays, node: {k: x.astype(np.float64 if x.dtype.kind == "f" else x.dtype) for k, x in arrays.items()},
    )
    assert {key: (x.dtype, x.shape) for key, x in made.items()} == {k: (x.dtype, x.shape) for k, x in OLD.items()}
    assert all(made[key].tobytes() == OLD[key].tobytes() for key in OLD)


def test_a_round_in_which_all_are_refused_changes_nothing():
    assert round_of(1e-3, moved(STEP))[:2] == (None, None)
    wrapped = CheckedStrategy(average(), 1e-3)
    wrapped.start(InProcess(moved(STEP), 4), record(OLD), num_rounds=2)
    assert arrays_of(wrapped.current_arrays)["w"].tolist() == OLD["w"].tolist()
    assert wrapped.num_refused == len(wrapped.norms) == 8


def test_clients_that_clip_are_accepted():
    """The threshold is sent by the strategy that adds noise, which the check stands before."""
    inner = DifferentialPrivacyClientSideFixedClipping(average(), 0.0, 0.1, 4)
    made, _, wrapped = round_of(0.1, moved(STEP), inner=inner, mods=[fixedclipping_mod])
    assert wrapped.num_refused == 0
    assert max(wrapped.norms) <= 0.1
    np.testing.assert_allclose(made["b"], 0.5 + 0.1 / math.sqrt(3), rtol=1e-6)


def test_the_noise_is_for_the_clients_that_are_accepted():
    inner = DifferentialPrivacyClientSideFixedClipping(average(), 1.0, 1.0, 4)
    round_of(1.0, moved(lambda node: 100.0 if node == 2 else STEP), inner=inner)
    assert inner._std() == pytest.approx(1 / 3)


def test_evaluation_and_the_settings_pass():
    wrapped = CheckedStrategy(theirs.FedAvg(), 1.0)
    grid = InProcess(moved(STEP), 4)
    made = wrapped.start(grid, record(OLD), num_rounds=1)
    assert grid.evaluated == 4
    assert made.evaluate_metrics_clientapp[1]["loss"] == pytest.approx(2.5)
    assert repr(wrapped) == "CheckedStrategy(FedAvg, max_norm=1.0, 0 refused)"


@pytest.mark.parametrize(("max_norm", "error"), [(-1.0, ValueError), (math.nan, ValueError), ("1", TypeError)])
def test_a_bad_threshold_is_an_error_at_once(max_norm, error):
    with pytest.raises(error):
        CheckedStrategy(average(), max_norm)
