"""Arrays that are changed where they lie, those that the kernels do not know beside those that they know."""

from types import SimpleNamespace

import numpy as np

from gradclip._src.backends.host.backend import HOST
from gradclip._src.backends.host.laid import clamp_, scale_
from gradclip._src.core.layouts import TREE
from gradclip._src.core.rules import Factors


def both():
    """Return an array that lies dense, and one that does not."""
    return np.array([3.0, -4.0]), np.array([3.0, 9.0, -4.0, 9.0])[::2]


def coefficient(**given):
    half = Factors(0.5, None)
    return SimpleNamespace(**({"keep": False, "blank": False, "wide": half, "narrow": half} | given))


def scaled(**given):
    arrays = both()
    scale_(HOST.enter(arrays), coefficient(**given), TREE, threads=1)
    return [x.tolist() for x in arrays]


def test_all_are_scaled():
    assert scaled() == [[1.5, -2.0], [1.5, -2.0]]


def test_what_is_kept_stays():
    assert scaled(keep=True) == [[3.0, -4.0], [3.0, -4.0]]


def test_what_is_blank_becomes_zero():
    assert scaled(blank=True) == [[0.0, 0.0], [0.0, 0.0]]


def test_all_are_clamped():
    arrays = both()
    clamp_(HOST.enter(arrays), 3.5, threads=1)
    assert [x.tolist() for x in arrays] == [[3.0, -3.5], [3.0, -3.5]]
