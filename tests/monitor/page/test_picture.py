"""The picture, as a figure and as SVGs for a page."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest

import gradclip
from gradclip._src.monitor.page.looks import Palette
from gradclip._src.monitor.page.picture import NARROW, WIDE, headline, svgs
from gradclip._src.monitor.records import Overview

ON_STEPS = ("norms", "losses", "share", "layers")


def shown(monitor):
    return Overview.of(monitor.records, monitor.counts, monitor.top)


@pytest.fixture(scope="module")
def monitor():
    fed = gradclip.Monitor()
    norms = np.geomspace(0.1, 10, 30)
    fed.record(norms, 1.0, layer_norms={"a": norms, "b": norms / 2})
    return fed


def test_a_figure_has_all_panels_and_is_saved(monitor, tmp_path):
    figure = monitor.plot(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert len(figure.axes) == 5  # four, and the bar of the heat map
    assert figure.get_suptitle() == "15 of 30 steps clipped (50.0%); 0 skipped, 0 not finite"


def test_a_figure_of_nothing():
    assert len(gradclip.Monitor().plot().axes) == 3
    assert headline(shown(gradclip.Monitor())) == "No step was recorded"


@pytest.mark.parametrize(("look", "width"), [(NARROW, 4.2), (WIDE, 10.4)])
def test_all_panels_have_the_same_margins(look, width):
    fed = gradclip.Monitor()
    norms = np.geomspace(0.1, 1e4, 30)
    fed.record(norms, 1.0, layer_norms={"a_long_name.of_a_layer": norms, "b": norms / 2}, loss=norms)
    drawn = svgs(shown(fed), look, width)
    assert list(drawn) == [*ON_STEPS, "histogram"]
    place = re.compile(r'<g id="xtick_[123]">.*?<use [^>]*x="([^"]+)"', re.DOTALL)
    ticks = {tuple(place.findall(drawn[name])[:3]) for name in ON_STEPS}
    assert len(ticks) == 1
    assert len(ticks.pop()) > 2


def test_svgs_take_the_colours_of_the_page_and_stand_alone(monitor):
    drawn = svgs(shown(monitor), NARROW, 4.2)
    assert list(drawn) == ["norms", "share", "layers", "histogram"]
    for svg in drawn.values():
        ET.fromstring(svg)
        assert not any(colour in svg for colour in vars(Palette()).values())
        assert "var(--ink)" in svg
        assert "<text" in svg  # letters, not shapes of letters
        assert "width=" not in svg[: svg.index(">")]
    assert drawn == svgs(shown(monitor), NARROW, 4.2)


def test_without_matplotlib_numbers_work_and_an_error_says_what_to_install():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import gradclip\n"
        "monitor = gradclip.Monitor(); monitor.record(2.0, 1.0); monitor.advise(); print(monitor.num_clipped)\n"
        "for draw in (monitor.plot, lambda: monitor.report('/nowhere')):\n"
        "    try: draw()\n"
        "    except ModuleNotFoundError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, *errors = done.stdout.splitlines()
    assert first == "1"
    assert len(errors) == 2
    assert all("matplotlib is not installed here. Run: pip install matplotlib" in error for error in errors)


def test_a_monitor_imports_matplotlib_only_to_draw():
    code = "import sys, gradclip; gradclip.Monitor().record(1.0, 1.0); print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
