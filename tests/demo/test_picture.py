"""The picture of runs in which nothing can be drawn."""

import math

import numpy as np
import pytest

from gradclip.demo.picture import write_picture
from gradclip.demo.results import describe_run
from gradclip.demo.training import Curves

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def curves(losses, norms, max_norm):
    return Curves(np.array(losses), np.array(norms), np.full(np.shape(norms), max_norm), np.full(len(losses), 0.25))


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
@pytest.mark.parametrize("max_norm", [0.0, 1.0, math.inf])
def test_a_picture_without_a_drawable_value_is_still_drawn(tmp_path, value, max_norm):
    nothing = describe_run("nothing", curves([[value] * 3], [[value] * 3], max_norm))
    path = write_picture((nothing, nothing), "title", tmp_path / "empty.png")
    assert path.read_bytes().startswith(PNG_SIGNATURE)
