"""The picture: of runs in which nothing can be drawn, and on pages of any colour."""

import math

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from demo_picture import write_picture
from demo_results import KINDS, Sweep, Trained
from demo_training import Curves

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


def test_every_letter_has_12_pixels_on_a_screen_of_400(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: saved.append(figure))
    write_picture(SWEEP, curves(1.0, 2.0), tmp_path / "demo.png")
    (figure,) = saved
    letters = [text for text in figure.findobj(Text) if text.get_text()]
    assert len(letters) >= 11
    points_a_pixel = 72 * figure.get_figwidth() / 400
    assert min(text.get_fontsize() for text in letters) / points_a_pixel >= 12
    figure.draw_without_rendering()
    drawn = figure.get_tightbbox()
    assert (drawn.x0, drawn.y0) >= (0, 0)
    assert (drawn.x1, drawn.y1) <= tuple(figure.get_size_inches())
