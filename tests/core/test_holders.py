"""What clipping asks of those who hold a gradient, and that it asks nothing else: a new kind is one class."""

from fractions import Fraction

import numpy as np
import pytest

from gradclip._src.backends.host.backend import HOST
from gradclip._src.core.decision import Clipping
from gradclip._src.core.holders import ALONE, Holders
from gradclip._src.core.nonfinite import PROPAGATE, RAISE
from gradclip._src.core.norms import Norm, Order
from gradclip._src.core.pipeline import decide
from gradclip._src.core.rules import CLIP

EUCLIDEAN = Order(2.0)


class WithFour(Holders):
    """Another holder has one more element, which is 4."""

    def measure(self, backend, arrays, order):
        mine = backend.norms(arrays, order)
        return Norm(np.hypot(mine.value, 4.0), None, mine.error + 2.0**-50, 0.0)

    def raise_nonfinite(self, backend, arrays, names):
        raise FloatingPointError(f"one of two holders has it, this one {names}")


class WithFourExactly(WithFour):
    def exact_check(self, backend):
        return lambda arrays, p, max_norm: sum(Fraction(float(x.data[0])) for x in arrays) ** 2 + 16 <= 25


def decided(holders, value, max_norm=5.0, policy=PROPAGATE):
    arrays = HOST.enter([np.array([value])])
    return decide(HOST, arrays, Clipping(max_norm, EUCLIDEAN, policy, CLIP), lambda: ["w"], holders=holders)


@pytest.mark.parametrize("holders", [WithFour(), WithFourExactly()])
def test_the_norm_is_that_of_the_whole(holders):
    made = decided(holders, 3.0, 2.5)
    assert made.norm.product() == 5.0
    assert float(made.coefficient.wide.first) == pytest.approx(0.5, rel=1e-12)


def test_a_tie_is_decided_by_all_holders_or_left_open():
    assert decided(WithFourExactly(), 3.0).coefficient.keep
    assert not decided(WithFour(), 3.0).coefficient.keep
    assert decided(ALONE, 5.0).coefficient.keep


def test_the_error_about_a_nan_is_that_of_the_holders():
    with pytest.raises(FloatingPointError, match=r"one of two holders has it, this one \['w'\]"):
        decided(WithFour(), np.nan, policy=RAISE)
    with pytest.raises(FloatingPointError, match="w: 1 NaN, 0 infinite of 1 elements"):
        decided(ALONE, np.nan, policy=RAISE)


def test_one_process_answers_as_the_core_does():
    groups = [HOST.enter([np.array([3.0, 4.0])]), HOST.enter([np.array([0.5], np.float32)])]
    assert [ALONE.measure(HOST, group, EUCLIDEAN).product() for group in groups] == [5.0, 0.5]
    assert [ALONE.norm_dtype(group) for group in groups] == ["float64", "float32"]
    assert not ALONE.unseen_dtypes
    check = ALONE.exact_check(HOST)
    assert check(groups[0], 2.0, 5.0)
    assert not check(groups[0], 2.0, np.nextafter(5.0, 0.0))
