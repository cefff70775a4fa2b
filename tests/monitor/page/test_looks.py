"""Colours and ticks."""

from matplotlib.figure import Figure

from gradclip._src.monitor.page.looks import Palette, ticks


def test_no_two_colours_are_alike():
    colours = list(vars(Palette()).values())
    assert len(set(colours)) == len(colours)


def labels(low, high):
    axes = Figure().add_subplot()
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    ticks(axes.yaxis, low, high)
    axes.figure.draw_without_rendering()
    places = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
    return [label.get_text() for place, label in places if low <= place <= high]


def test_every_range_has_ticks_in_plain_numbers():
    assert labels(0.5, 2.5) == ["0.5", "1", "1.5", "2", "2.5"]
    assert labels(1, 50) == ["1", "2", "5", "10", "20", "50"]
    assert labels(0.1, 1e4) == ["0.1", "1", "10", "100", "1,000", "10,000"]
