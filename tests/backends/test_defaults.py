"""What a backend answers that has nothing better to offer."""

import numpy as np
import pytest

from gradclip.backends.defaults import Defaults
from gradclip.core.arrays import Arrays
from gradclip.core.memory import Region

ARRAYS = Arrays([np.zeros(3)])


def test_nothing_is_done_at_once():
    found = Defaults()
    assert found.at_once(ARRAYS) is None
    assert found.norm_at_once(ARRAYS, 2.0) is None
    assert found.norms_of(ARRAYS, 2.0) is None
    assert found.together(ARRAYS) is None


def test_a_mesh_is_refused():
    with pytest.raises(TypeError, match="axis_name='x' names axes of a mesh"):
        Defaults().over("x")


def test_regions_that_meet_are_found():
    class InMemory(Defaults):
        def region(self, leaf):
            return Region.of(leaf, 4, (2,), [4])

    assert InMemory().collide([100, 104], ARRAYS)
    assert not InMemory().collide([100, 108], ARRAYS)
    assert InMemory().meeting([100, 108, 104, 116], [None] * 4) == [[0, 1, 2]]
