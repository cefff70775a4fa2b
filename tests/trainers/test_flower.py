"""Flower's mods for clients, within a real `ClientApp`, beside Flower's own."""

import math
from fractions import Fraction

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp, mod
from flwr.supercore import differential_privacy
from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM, KEY_NORM_BIT

from federation import arrays_of, record
from gradclip.integrations import flower

MODS = {"fixed": flower.fixedclipping_mod, "adaptive": flower.adaptiveclipping_mod}
both = pytest.mark.parametrize("name", MODS)


def message(sent, threshold=1.0, kind="train"):
    config = ConfigRecord({} if threshold is None else {KEY_CLIPPING_NORM: threshold})
    return Message(RecordDict({"arrays": record(sent), "config": config}), dst_node_id=7, message_type=kind)


def reply(mods, sent, trained, threshold=1.0, kind="train", metrics=1):
    """Return what a ClientApp with mods answers, if its function returns `trained`."""
    app = ClientApp(mods=mods)

    @app.evaluate()
    @app.train()
    def answer(asked, context):
        records = {f"metrics{i}": MetricRecord({"num-examples": 3}) for i in range(metrics)}
        return Message(RecordDict({"arrays": record(trained), **records}), reply_to=asked)

    return app(message(sent, threshold, kind), Context(1, 7, {}, RecordDict(), {}))


def clipped(mods, sent, trained, threshold=1.0):
    return arrays_of(reply(mods, sent, trained, threshold).content["arrays"])


def longer_than(new, old, threshold):
    pairs = [(new[key].ravel(), old[key].ravel()) for key in old]
    exact = [Fraction(float(a)) - Fraction(float(b)) for x, o in pairs for a, b in zip(x, o, strict=True)]
    server = [Fraction(float(d)) for x, o in pairs for d in np.subtract(x, o)]
    return any(sum(d * d for d in each) > Fraction(threshold) ** 2 for each in (exact, server))


def model(seed):
    rng = np.random.default_rng(seed)
    old = {"w": rng.normal(size=(6, 4)).astype(np.float32), "b": rng.normal(size=4).astype(np.float32)}
    return old, {key: (x + rng.normal(size=x.shape)).astype(np.float32) for key, x in old.items()}


@both
def test_the_update_that_the_server_computes_keeps_the_bound(name):
    broken = 0
    for seed in range(100):
        old, new = model(seed)
        theirs = {"fixed": mod.fixedclipping_mod, "adaptive": mod.adaptiveclipping_mod}[name]
        ours, usual = clipped([MODS[name]], old, new), clipped([theirs], old, new)
        assert not longer_than(ours, old, 1.0)
        broken += longer_than(usual, old, 1.0)
        for key in old:
            np.testing.assert_allclose(ours[key], usual[key], rtol=0.0, atol=4e-7)
    assert broken > 30


@both
def test_messages_keep_their_keys_and_metrics(name):
    old, new = model(0)
    answer = reply([MODS[name]], old, new, 1.0)
    assert list(answer.content["arrays"].keys()) == ["w", "b"]
    expected = {"num-examples": 3} | ({KEY_NORM_BIT: 1} if name == "adaptive" else {})
    assert dict(answer.content["metrics0"]) == expected


def test_the_norm_bit_says_whether_the_update_was_longer():
    old, new = {"w": np.zeros(2, np.float32)}, {"w": np.array([3.0, 4.0], np.float32)}
    for threshold, bit in ((4.99, 1), (5.0, 0), (1e9, 0)):
        answer = reply([flower.adaptiveclipping_mod], old, new, threshold)
        assert answer.content["metrics0"][KEY_NORM_BIT] == bit
    assert answer.content["arrays"]["w"].numpy().tobytes() == new["w"].tobytes()


@both
def test_what_flower_cannot_clip(name):
    """Zero updates divide by zero, counters count or cannot be scaled, 0-d parameters are left as they are."""
    old = {"w": np.zeros(2, np.float32), "scale": np.zeros((), np.float32), "num_batches_tracked": np.array(10)}
    with pytest.raises(ZeroDivisionError):
        differential_privacy.compute_clip_model_update(list(old.values())[:1], list(old.values())[:1], 1.0)
    new = {"w": np.array([3.0, 4.0], np.float32), "scale": np.float32(12.0), "num_batches_tracked": np.array(17)}
    with pytest.raises(TypeError, match="Cannot cast"):
        differential_privacy.compute_clip_model_update([np.array([17])], [np.array([10])], 1.0)
    assert differential_privacy.get_norm(list(new.values())) > 13 == flower.get_norm(list(new.values()))
    left = [np.array(12.0, np.float32)]
    differential_privacy.compute_clip_model_update(left, [np.array(0.0, np.float32)], 1.0)
    assert left == [12.0]

    same = clipped([MODS[name]], old, old)
    assert [x.tolist() for x in same.values()] == [[0.0, 0.0], 0.0, 10]
    made = clipped([MODS[name]], old, new, 6.5)
    np.testing.assert_allclose([*made["w"], made["scale"]], [1.5, 2.0, 6.0], rtol=1e-6)
    assert made["num_batches_tracked"] == 17
    assert made["num_batches_tracked"].dtype == np.int64
    assert made["scale"].shape == ()


@both
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_update_that_is_not_finite_is_sent_as_zero(name, bad, caplog):
    old, new = {"w": np.ones(2, np.float32)}, {"w": np.array([2.0, bad], np.float32)}
    answer = reply([MODS[name]], old, new)
    assert answer.content["arrays"]["w"].numpy().tolist() == [1.0, 1.0]
    assert answer.content["metrics0"].get(KEY_NORM_BIT, 0) == 0
    with np.errstate(invalid="ignore"):
        assert not np.isfinite(clipped([mod.fixedclipping_mod], old, new)["w"]).all()
    assert "the update has NaN or infinities" in caplog.text


@both
def test_messages_that_are_not_for_training_pass(name):
    old, new = model(0)
    assert reply([getattr(mod, f"{name}clipping_mod")], old, new, None, "evaluate").has_error()
    answer = reply([MODS[name]], old, new, None, "evaluate")
    assert not answer.has_error()
    assert answer.content["arrays"]["w"].numpy().tobytes() == new["w"].tobytes()


@both
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"threshold": None}, "needs a threshold of 0 or more as 'clipping_norm' in the ConfigRecord, got None"),
        ({"threshold": -1.0}, "needs a threshold of 0 or more as 'clipping_norm' in the ConfigRecord, got -1.0"),
        ({"threshold": math.nan}, "got nan"),
        ({"trained": {"b": np.zeros(2, np.float32)}}, "expects the keys of the trained arrays to be those"),
        ({"trained": {"w": np.zeros(3, np.float32)}}, "cannot clip: .* array 0 has shape (3,), and (2,) was sent"),
        ({"sent": {"w": np.zeros(2, int)}}, "cannot clip: array 0 was sent in int64 and comes back in float32"),
        ({"trained": {"w": np.array([10**9, 10**9])}}, "array 0 was sent in float32 and comes back in int64"),
        ({"trained": {"w": np.array(["1", "2"])}}, "cannot clip: array 0 has dtype <U1, which cannot be clipped"),
    ],
)
def test_messages_that_do_not_fit_are_answered_with_an_error(name, change, reason):
    old = {"w": np.zeros(2, np.float32)}
    answer = reply([MODS[name]], **({"sent": old, "trained": old} | change))
    assert answer.has_error()
    assert answer.error.reason.startswith(f"{name}clipping_mod ")
    assert all(part in answer.error.reason for part in reason.split(" .* "))


def test_the_adaptive_mod_needs_metrics():
    old = {"w": np.zeros(2, np.float32)}
    answer = reply([flower.adaptiveclipping_mod], old, old, metrics=0)
    assert "expects exactly one MetricRecord, but found 0" in answer.error.reason
    assert not reply([flower.fixedclipping_mod], old, old, metrics=0).has_error()


def test_an_error_of_the_training_is_passed_on():
    app = ClientApp(mods=[flower.fixedclipping_mod])

    @app.train()
    def fails(asked, context):
        raise ValueError("no data")

    with pytest.raises(ValueError, match="no data"):
        app(message({"w": np.zeros(2, np.float32)}), Context(1, 7, {}, RecordDict(), {}))


def test_names_are_those_of_flower():
    own = {"get_norm", "clip_inputs_inplace", "adaptive_clip_inputs_inplace"}
    own |= {"compute_clip_model_update", "compute_adaptive_clip_model_update"}
    assert all(hasattr(differential_privacy, name) for name in own)
    assert own | {"fixedclipping_mod", "adaptiveclipping_mod"} == {n for n in flower.__all__ if n.islower()}
