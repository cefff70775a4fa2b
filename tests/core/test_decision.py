"""What follows from a norm: a coefficient, and whether anything changes."""

import numpy as np
import pytest

from gradclip._src.backends.registry import find
from gradclip._src.core.decision import Clipping, Each, from_norm
from gradclip._src.core.holders import ALONE
from gradclip._src.core.layouts import Groups
from gradclip._src.core.nonfinite import Nonfinite
from gradclip._src.core.norms import Order
from gradclip._src.core.pipeline import decide
from gradclip._src.core.rules import CLIP, Into
from part_by_part import at_once, part_by_part


def entered(*leaves):
    backend = find(leaves, lambda: ["x"] * len(leaves))
    return backend, backend.enter(list(leaves))


@pytest.mark.parametrize(
    ("norm", "threshold", "kept", "result"), [(5.0, 5.0, True, [3.0, 4.0]), (10.0, 5.0, False, [1.5, 2.0])]
)
def test_a_norm_that_is_given_decides(norm, threshold, kept, result):
    x = np.array([3.0, 4.0])
    backend, arrays = entered(x)
    with backend.precision():
        made = from_norm(backend, norm, 5.0, arrays)
        (y,) = backend.leave_all(made.scaled(backend), [x])
    assert made.changes_nothing(backend, arrays) is kept
    assert y.tolist() == pytest.approx(result, rel=1e-6)
    assert (y == result).all() or not kept


@pytest.mark.parametrize("mode", [at_once, part_by_part])
def test_what_each_norm_decides_is_done_in_place(mode):
    leaves = [np.array([3.0, 4.0]), np.array([0.3, 0.4]), np.array([6.0]), np.array([8.0])]
    backend, arrays = entered(*leaves)
    layout = Groups([[0], [1], [2, 3]])
    asked = Clipping(Each([1.0, 1.0, 5.0]), Order(2.0), Nonfinite.named("propagate"), CLIP)
    with mode(), backend.precision():
        made = decide(backend, arrays, asked, lambda: ["x"] * 4, layout=layout, holders=ALONE)
        assert made.coefficient.keep.tolist() == [False, True, False]
        assert made.norm.product().tolist() == [5.0, 0.5, 10.0]
        assert made.scaled(backend, Into(arrays, leaves)) == leaves
    assert [x.round(6).tolist() for x in leaves] == [[0.6, 0.8], [0.3, 0.4], [3.0], [4.0]]
