"""The picture: of runs in which nothing can be drawn, and on pages of any colour."""

import math

import matplotlib.image
import numpy as np
import pytest

from gradclip.demo.picture import write_picture
from gradclip.demo.results import KINDS, Sweep, Trained
from gradclip.demo.training import Curves

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
SWEEP = Sweep([Trained(kind, 0.1, (0.25,), (0.0,), (False,)) for kind in KINDS], 0.5)


def curves(norm, max_norm):
    norms, max_norms = np.full((1, 3), norm), np.full((1, 3), max_norm)
    return Curves(norms, norms, max_norms, None, np.array([0.25]))


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
@pytest.mark.parametrize("max_norm", [0.0, 1.0, math.inf])
def test_a_picture_without_a_drawable_value_is_still_drawn(tmp_path, value, max_norm):
    path = write_picture(SWEEP, curves(value, max_norm), tmp_path / "empty.png")
    assert path.read_bytes().startswith(PNG_SIGNATURE)


def test_the_background_hides_that_of_the_page(tmp_path):
    """It is white and opaque, so that dark letters can be read on a dark page."""
    pixels = matplotlib.image.imread(write_picture(SWEEP, curves(1.0, 2.0), tmp_path / "demo.png"))
    assert pixels.shape[1] == 1200
    assert (pixels[..., 3] == 1).all()
    assert (pixels[0] == 1).all()
