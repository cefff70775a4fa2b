"""The norm of each gradient is taken once, and names are found once for the same owners."""

import gc
import weakref

import numpy as np

from gradclip._src.core.norms import Order
from gradclip._src.core.pipeline import EachNorm, Names


class Owner:
    def __eq__(self, other):
        raise AssertionError("owners are told apart by what they are, not by what they are equal to")


def fail():
    raise AssertionError("asked again")


def test_names_are_found_once_for_the_same_owners():
    names, owners = Names(), [Owner(), Owner()]
    assert names.of(owners, (), lambda: ["a", "b"]) == ["a", "b"]
    assert names.of(list(owners), (), fail) == ["a", "b"]
    assert names.of(owners, ("c", "d"), lambda: ["c", "d"]) == ["c", "d"]
    assert names.of(owners[::-1], (), lambda: ["b", "a"]) == ["b", "a"]
    assert names.of(owners[:1], (), lambda: ["a"]) == ["a"]


def test_owners_are_not_kept_alive():
    names, owner = Names(), Owner()
    names.of([owner], (), lambda: ["a"])
    alive = weakref.ref(owner)
    del owner
    gc.collect()
    assert alive() is None
    assert names.of([Owner()], (), lambda: ["b"]) == ["b"]


def test_names_of_owners_without_weak_references_are_found_each_time():
    names, owners = Names(), [object()]
    assert [names.of(owners, (), lambda name=name: [name]) for name in ("a", "b")] == [["a"], ["b"]]


def test_sums_become_norms():
    for p, expected in ((2, [5.0, 12.0]), (1, [25.0, 144.0])):
        each = EachNorm()
        each.take([25.0, 144.0], Order.parse(p), ([Owner(), Owner()], ()), lambda: ["a", "b"])
        assert (each.names, each.norms.tolist()) == (["a", "b"], expected)


def test_only_the_first_measurement_counts():
    each = EachNorm()
    each.take([25.0], Order.parse(2), ([], ()), lambda: ["a"])
    each.take([1.0], Order.parse(2), ([], ()), fail)
    np.testing.assert_array_equal(each.norms, [5.0])


class Refusing(list):
    def __getitem__(self, index):
        assert not isinstance(index, list)  # a GPU would wait for it
        return super().__getitem__(index)


def test_some_norms_are_taken_one_by_one():
    each = EachNorm()
    each.put(Refusing([1.0, 2.0, 3.0]), ["a", "b", "c"])
    chosen, nothing = each.of([2, 0], tuple), each.of([], tuple)
    assert (chosen.names, chosen.norms) == (["c", "a"], (3.0, 1.0))
    assert (nothing.names, nothing.norms) == ([], [])
