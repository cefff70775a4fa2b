"""A number that a process failed to compute spoils each sum with it. `ties.py` has several processes."""

import operator
import pickle
from fractions import Fraction
from functools import reduce
from itertools import permutations

import pytest

from gradclip._src.distributed import sent
from gradclip._src.distributed.sent import Attempts, Failed

FIRST, SECOND = Failed(frozenset(["rank 1: one"])), Failed(frozenset(["rank 2: two"]))


@pytest.mark.parametrize("numbers", list(permutations([Fraction(1, 3), float("nan"), 0, FIRST])))
def test_it_spoils_sums_in_any_order(numbers):
    assert sum(numbers) == reduce(operator.add, numbers) == FIRST


def test_sums_tell_of_all_that_failed():
    both = pickle.loads(pickle.dumps(FIRST)) + Fraction(2) + SECOND
    with pytest.raises(RuntimeError, match=r"on another process, .*: rank 1: one; rank 2: two Nothing has been"):
        Attempts().check([Fraction(1), both, FIRST])


def test_the_own_error_is_raised_once_the_others_know(monkeypatch):
    monkeypatch.setattr(sent, "rank", lambda: 3)
    own = Attempts()
    assert own.of(lambda: Fraction(1, 2)) == Fraction(1, 2)
    assert own.of(lambda: 1 // 0).told == {"rank 3: ZeroDivisionError: integer division or modulo by zero"}
    with pytest.raises(ZeroDivisionError):
        own.check([FIRST])


def test_nothing_is_raised_where_all_is_known():
    Attempts().check([Fraction(1), float("nan")])
