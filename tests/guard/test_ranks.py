"""Which processes are told from others. Real ones are in tests/distributed/guarding.py."""

import json
import math

import pytest
import torch

from gradclip._src.guard.ranks import _KEPT, Ranks


class Store(dict):
    """A store that never waits."""

    def check(self, keys):
        return all(key in self for key in keys)

    def get(self, key):
        return self[key]

    set = dict.__setitem__


def process(rank, store):
    one = object.__new__(Ranks)
    one._store, one._rank, one._first, one._name = store, rank, 0, "name"
    one._own, one._replicas, one.open = {}, False, False
    return one


@pytest.fixture
def two():
    store = Store()
    return process(0, store), process(1, store)


def weight(*gradient, value=1.0):
    parameter = torch.nn.Parameter(torch.full((len(gradient),), value))
    parameter.grad = torch.tensor(gradient)
    return [parameter]


def published(one, step, parameters):
    one.publish(step, parameters, parameters, parameters[0].grad.norm().item())


@pytest.mark.parametrize(
    ("own", "differs"),
    [
        (weight(3.0, 4.0), False),
        (weight(3.0, 4.00001), False),
        (weight(4.0, 3.0), False),  # the same norm and sum: not seen
        (weight(5.0, 0.0), True),
        (weight(3.0, 5.0), True),
        (weight(math.nan, 4.0), True),
        (weight(3.0, 4.0, 0.0), False),  # another shape
        (weight(5.0, 0.0, value=2.0), False),  # other parameters
    ],
)
def test_gradients_of_replicas(two, own, differs):
    first, second = two
    published(first, 1, weight(3.0, 4.0))
    published(second, 1, own)
    assert bool(second.differing()) == differs
    assert bool(first.differing()) == differs


def test_replicas_stay_replicas(two):
    first, second = two
    for step, value in ((1, 1.0), (2, 1.5)):  # what differed before has changed the parameters
        published(first, step, weight(3.0, 4.0))
        published(second, step, weight(3.0, 4.0 * step, value=value))
    assert "at step 2, rank 1 got other gradients than rank 0" in second.differing()


def test_nobody_waits(two):
    first, second = two
    assert (first.differing(), second.differing()) == ("", "")
    published(second, 1, weight(3.0, 4.0))
    assert second.differing() == ""
    assert second.open
    published(first, 1, weight(1.0, 4.0))
    assert second.differing()
    assert not second.open


def test_few_looks_are_kept(two):
    first, _ = two
    for step in range(20):
        published(first, step, weight(3.0, 4.0))
    assert list(json.loads(first._store["name/0"])) == [str(step) for step in range(20 - _KEPT, 20)]
