"""What a backend answers that has nothing better to offer."""

from functools import partial

import numpy as np
import pytest

from gradclip._src.core.arrays import Arrays
from gradclip._src.core.memory import Region
from gradclip._src.core.rules import Into
from plain_backend import Plain

ARRAYS = Arrays([np.zeros(3)])


def test_nothing_is_done_at_once():
    found = Plain()
    assert found.multi_tensor(ARRAYS) is None
    assert found.vectorisable_with(ARRAYS) is None
    for call in (partial(found.clear, ARRAYS), partial(found.write_back, 1.0, 2.0), partial(found.write, (), Into(()))):
        with pytest.raises(NotImplementedError):
            call()


def test_a_mesh_is_refused():
    with pytest.raises(TypeError, match="axis_name='x' names axes of a mesh"):
        Plain().mesh("x")


def test_regions_that_meet_are_found():
    class InMemory(Plain):
        def region(self, leaf):
            return Region.of(leaf, 4, (2,), [4])

    found = InMemory()
    assert found.collide([100, 104], ARRAYS)
    assert not found.collide([100, 108], ARRAYS)
    assert found.meeting([100, 108, 104, 116], [None] * 4) == [[0, 1, 2]]
