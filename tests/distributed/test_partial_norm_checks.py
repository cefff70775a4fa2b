"""Partial norms that are made by hand or come from somebody else, as text, and parts that were not counted."""

import itertools
import json
import math
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import gradclip
from gradclip import PartialNorm
from gradclip._src.core import accumulators
from gradclip._src.core.norms import Order

ORDERS = [1, 1.5, 2, 3, 8, math.inf, -math.inf]
VALUES = [
    [],
    [0.0],
    [3.0, 4.0],
    [1e-320],
    [1e300, 1e-300],
    [-2.5] * 7,
    [math.nan, 1.0],
    [math.inf],
    [math.nan, math.inf],
]


def same(first, second):
    return repr(first) == repr(second)


def parts_of(ord):
    return [gradclip.partial_norm(np.array(values), ord) for values in VALUES]


@pytest.mark.parametrize("ord", ORDERS)
def test_what_partial_norm_returns_travels_to_the_last_bit(ord):
    parts = parts_of(ord)
    parts += [first + second for first, second in itertools.product(parts, parts)] + [sum(parts)]
    parts.append(sum([gradclip.partial_norm(np.array([1.7e308]), ord)] * 1000))
    for part in parts:
        text = part.to_json()
        assert same(PartialNorm.from_json(text), part)
        assert same(PartialNorm.from_json(text.encode()), part)
        assert same(pickle.loads(pickle.dumps(part)), part)
        assert json.loads(text, parse_constant=pytest.fail).keys() == {"ord", "numbers", "parts", "floor"}


def test_as_text():
    assert gradclip.partial_norm(np.array([3.0, -4.0]), math.inf).to_json() == (
        '{"ord": "inf", "numbers": [4.0, 0.0, 0.0], "parts": 1, "floor": 0.0}'
    )


def test_numbers_of_any_kind():
    made = PartialNorm(2, [np.float32(0), 0, 1, 0, 0.0, np.float64(0)], np.int64(2), np.float32(0.5))
    assert same(made, PartialNorm(2.0, (0.0, 0.0, 1.0, 0.0, 0.0, 0.0), 2, 0.5))
    assert {type(x) for x in (made.ord, *made.numbers, made.floor)} == {float}


GOOD = [0.0, 25.0, 0.0, 0.0, 1e-15, 0.0]
WRONG = [
    ({"ord": 0.5}, ValueError, "ord must be a number >= 1"),
    ({"ord": -2}, ValueError, "ord must be"),
    ({"ord": math.nan}, ValueError, "ord must be"),
    ({"ord": 9}, ValueError, "at most 8"),
    ({"ord": 3}, ValueError, "numbers must have 10 entries for ord=3, got 6"),
    ({"ord": math.inf}, ValueError, "numbers must have 3 entries"),
    ({"ord": "2"}, TypeError, "ord must be a number"),
    ({"ord": None}, TypeError, "ord must be a number"),
    ({"ord": True}, ValueError, "ord must be"),
    ({"numbers": GOOD[:-1]}, ValueError, "numbers must have 6 entries for ord=2, got 5"),
    ({"numbers": [*GOOD, 0.0]}, ValueError, "numbers must have 6 entries for ord=2, got 7"),
    ({"numbers": ()}, ValueError, "got 0"),
    ({"numbers": 5.0}, TypeError, "numbers must be a tuple"),
    ({"numbers": "000000"}, TypeError, "numbers must be a tuple"),
    ({"numbers": np.zeros(6)}, TypeError, "numbers must be a tuple"),
    ({"numbers": ["0"] * 6}, TypeError, "numbers must hold numbers, got '0'"),
    ({"numbers": [False] * 6}, TypeError, "numbers must hold numbers, got False"),
    ({"numbers": [None] * 6}, TypeError, "numbers must hold numbers"),
    ({"numbers": [0.0] * 5 + [1j]}, TypeError, "numbers must hold numbers"),
    ({"numbers": [0, 10**400, 0, 0, 0, 0]}, ValueError, "numbers in the range of float64"),
    ({"parts": 0}, ValueError, "parts must be from 1 to"),
    ({"parts": -3}, ValueError, "parts must be from 1 to"),
    ({"parts": 2**53}, ValueError, "parts must be from 1 to"),
    ({"parts": 1.0}, TypeError, "parts must be an integer"),
    ({"parts": True}, TypeError, "parts must be an integer"),
    ({"parts": None}, TypeError, "parts must be an integer"),
    ({"floor": -1e-300}, ValueError, "floor must be finite and non-negative"),
    ({"floor": math.nan}, ValueError, "floor must be finite"),
    ({"floor": math.inf}, ValueError, "floor must be finite"),
    ({"floor": "0"}, TypeError, "floor must hold numbers"),
]


@pytest.mark.parametrize(("changed", "kind", "words"), WRONG, ids=range(len(WRONG)))
def test_what_is_no_partial_norm(changed, kind, words):
    values = {"ord": 2.0, "numbers": tuple(GOOD), "parts": 1, "floor": 0.0}
    assert PartialNorm(**values).norm == 5.0
    with pytest.raises(kind, match=words):
        PartialNorm(**values | changed)


@pytest.mark.parametrize("ord", ORDERS)
def test_numbers_that_no_gradient_has(ord):
    """Negative ones and NaN anywhere but in the last sum; errors that would hide that a bound does not hold."""
    order = Order.parse(ord)
    known = gradclip.partial_norm(np.array([3.0, -4.0]), ord).numbers
    half = len(known) // 2
    for place, bad in itertools.product(range(len(known)), [-1.0, -5e-324, math.nan, math.inf, -math.inf]):
        changed = (*known[:place], bad, *known[place + 1 :])
        allowed = place == half - 1 and (bad == math.inf or math.isnan(bad))
        if order.extreme:
            allowed = place == 0 and (bad > 0) == (order.p > 0) and not math.isnan(bad)
        if allowed:
            assert PartialNorm(ord, changed).numbers == pytest.approx(changed, nan_ok=True)
        else:
            with pytest.raises(ValueError, match="must be what partial_norm returns"):
                PartialNorm(ord, changed)
    for error in (0.02, 1.0, 1e300):
        with pytest.raises(ValueError, match="must be what partial_norm returns"):
            PartialNorm(ord, (*known[:-1], error))
    assert len(known) == accumulators.length(order)


def test_too_many_parts_together():
    many = PartialNorm(2, GOOD, 2**40)
    with pytest.raises(ValueError, match="parts must be from 1 to"):
        many + many


def test_what_is_unpickled_is_checked():
    part = gradclip.partial_norm(np.array([3.0, 4.0]))
    for name, value in (("floor", -1.0), ("numbers", (-25.0,) * 6), ("parts", 0), ("ord", 0.5)):
        forged = gradclip.partial_norm(np.array([3.0, 4.0]))
        object.__setattr__(forged, name, value)
        sent = pickle.dumps(forged)
        with pytest.raises(ValueError, match=name):
            pickle.loads(sent)
    assert pickle.loads(pickle.dumps(part)) == part


def written(**changed):
    return json.dumps({"ord": 2.0, "numbers": GOOD, "parts": 1, "floor": 0.0} | changed)


TEXTS = [
    "",
    "5.0",
    "null",
    "[]",
    "{}",
    "{" * 100_000,
    "[" * 100_000,
    b"\xff\xfe\xfd",
    written(more=1),
    '{"ord": 2.0, "numbers": [0, 25, 0, 0, 0, 0], "parts": 1}',
    written(numbers="inf"),
    written(numbers={"0": 1}),
    written(numbers=["infinity", 0, 0, 0, 0, 0]),
    written(numbers=["1e5", 0, 0, 0, 0, 0]),
    written(numbers=[0, math.nan, 0, 0, 0, 0]),
    written(numbers=[0, -25.0, 0, 0, 0, 0]),
    written(numbers=[0, 10**400, 0, 0, 0, 0]),
    written(numbers=[[0], 0, 0, 0, 0, 0]),
    written(floor=-1),
    written(floor="inf"),
    written(parts=1.5),
    written(parts="1"),
    written(ord="2"),
    written(ord=None),
    written(ord=[2]),
    written().replace("}", ', "parts": 2}'),
]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_texts_that_are_no_partial_norm(text):
    with pytest.raises(ValueError, match="not a partial norm written by to_json"):
        PartialNorm.from_json(text)


def test_what_is_no_text():
    for wrong in (None, 5, {"ord": 2.0}, gradclip.partial_norm(np.ones(2))):
        with pytest.raises(ValueError, match="not a partial norm written by to_json"):
            PartialNorm.from_json(wrong)


MAKE = {"NumPy": np.asarray, "PyTorch": torch.tensor, "JAX": jnp.asarray}


@pytest.mark.parametrize("framework", MAKE)
@pytest.mark.parametrize("ord", ORDERS)
def test_a_part_that_was_not_counted_is_refused(ord, framework):
    make = MAKE[framework]
    counted, other = make(np.float32([3.0, 4.0])), make(np.float32([2.0] * 9 + [0.1]))
    whole = gradclip.partial_norm(counted, ord)
    larger = {-math.inf: make(np.float32([2.5, 3.0]))}.get(ord, make(np.float32([3.0, 4.1])))
    bad = make(np.float32([1.0, math.nan]))
    for wrong in (larger, bad) if ord in (3, 8, math.inf) else (larger, bad, other):
        with pytest.raises(ValueError, match="the part was not added, or has changed since"):
            whole.clip({"w": wrong}, 1.0)
    smaller = {-math.inf: make(np.float32([3.5, 9.0]))}.get(ord, make(np.float32([3.0, 3.9])))
    for right in (counted, smaller, make(np.float32([]))):
        whole.clip([right], 1.0)
        (whole + gradclip.partial_norm(other, ord)).clip([right], 1.0)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("ord", ORDERS)
def test_every_part_of_a_sum_is_taken(ord, dtype):
    rng = np.random.default_rng(0)
    for _ in range(40):
        limit = 3.0 if dtype is np.float16 else 30.0
        parts = [
            (rng.standard_normal(rng.integers(1, 9)) * 10.0 ** rng.uniform(-limit, limit)).astype(dtype) for _ in "123"
        ]
        alone, together = gradclip.partial_norm(parts[0], ord), sum(gradclip.partial_norm(x, ord) for x in parts)
        alone.clip(parts[0], alone.norm / 2)
        for x in parts:
            together.clip(x, together.norm / 2)


def test_norms_beyond_the_range():
    huge, double = np.array([1.5e308] * 4), np.array([1.7e308] * 4)
    whole = gradclip.partial_norm(huge)
    assert whole.norm == math.inf
    np.testing.assert_allclose(whole.clip(huge, 1.0), [0.5] * 4, rtol=1e-12)
    with pytest.raises(ValueError, match="was not added, or has changed"):
        whole.clip(double, 1.0)
    tiny = gradclip.partial_norm(np.array([5e-324]))
    with pytest.raises(ValueError, match="was not added, or has changed"):
        tiny.clip(huge, 1.0)


def test_under_jit_nothing_is_looked_at():
    whole = gradclip.partial_norm(np.array([3.0, 4.0]))
    clipped = jax.jit(lambda x: whole.clip(x, 1.0))(jnp.array([3.0, 4.0]))
    np.testing.assert_allclose(clipped, [0.6, 0.8], rtol=1e-6)
