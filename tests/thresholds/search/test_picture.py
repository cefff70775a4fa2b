"""The picture of a search shows every loss, the best threshold and where training diverged."""

import math
import subprocess
import sys

from gradclip._src.thresholds.search.find import MaxNormSearch
from gradclip._src.thresholds.search.picture import draw
from gradclip._src.thresholds.search.trials import Trial

TABLE = (
    Trial(0.1, 0.01, (2.0, 3.0)),
    Trial(math.inf, 0.01, (1.0, math.nan)),
    Trial(0.1, 0.1, (0.5, 0.7)),
    Trial(math.inf, 0.1, (math.nan, math.nan)),
)


def test_the_lines_and_the_best():
    axis = draw(TABLE, TABLE[2]).axes[0]
    by_label = {line.get_label(): line for line in axis.lines}
    assert by_label["learning rate 0.01"].get_ydata()[0] == 2.5
    assert math.isnan(by_label["learning rate 0.01"].get_ydata()[1])
    assert by_label["best: 0.1"].get_ydata() == [0.6]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["0.1", "inf"]
    assert sum(line.get_marker() == "x" for line in axis.lines) == 2
    assert axis.get_yscale() == "log"
    named = [text.get_text() for text in axis.get_legend().get_texts()]
    assert named == ["learning rate 0.01", "a seed diverged", "learning rate 0.1", "best: 0.1"]


def test_losses_below_zero_have_a_linear_axis():
    assert draw([Trial(1.0, None, (-1.0,))], None).axes[0].get_yscale() == "linear"


def test_a_search_in_which_all_diverged_is_drawn():
    assert len(draw([Trial(1.0, None, (math.nan,))], None).axes) == 1


def test_it_is_saved(tmp_path):
    MaxNormSearch(TABLE, (0, 1)).plot(tmp_path / "search.png")
    assert (tmp_path / "search.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_search_has_numbers_and_its_picture_says_what_to_install():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import gradclip\n"
        "found = gradclip.find_max_norm(lambda max_norm, seed: 1.0, [1.0])\n"
        "print(len(found.table))\n"
        "found.plot()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "1\n"
    assert "Run: pip install matplotlib" in done.stderr
