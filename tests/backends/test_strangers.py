import io
from collections import UserDict
from pathlib import Path

import pytest

from gradclip.backends.strangers import how_to_convert


class Table:
    def to_numpy(self):
        return []


@pytest.mark.parametrize(
    ("leaf", "advice"),
    [
        (UserDict(), "dict(...)"),
        (Table(), "to_numpy()"),
        ("grads.npz", "numpy.load"),
        (b"grads.npz", "numpy.load"),
        (Path("grads.npz"), "numpy.load"),
        (io.BytesIO(), "numpy.load"),
        ((x for x in ()), "clip_grad_norm_"),
        ({1.0}, "list(...)"),
        (range(2), "list(...)"),
    ],
)
def test_advice_fits_what_was_passed(leaf, advice):
    assert advice in how_to_convert(leaf)


def test_there_is_none_for_what_holds_no_arrays():
    assert how_to_convert(object()) == how_to_convert(True) == ""
