"""The report: one page that stands alone and says what people misread."""

import re
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest

import gradclip
from gradclip.monitor.page import notes, page
from gradclip.monitor.records import Overview


def shown(monitor):
    return Overview.of(monitor.records, monitor.counts, monitor.top)


def fed(norms, max_norm=1.0, **settings):
    monitor = gradclip.Monitor(**settings)
    monitor.record(np.array(norms, float), max_norm, nonfinite="propagate")
    return monitor


class Tags(HTMLParser):
    """Notes every tag, and that all are closed in their order."""

    VOID = ("meta", "link", "path", "use", "rect", "image", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.seen = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    monitor = gradclip.Monitor()
    norms = np.geomspace(0.1, 10, 40)
    monitor.record(norms, 1.0, {"<layer>": norms, "b": norms / 2})
    path = monitor.report(tmp_path_factory.mktemp("page") / "report.html", "Norms & <more>")
    return path.read_text(encoding="utf-8")


def test_the_page_is_whole(written):
    tags = Tags(written)
    assert tags.open == []
    names = [tag for tag, _ in tags.seen]
    assert (names.count("svg"), names.count("figure"), names.count("table")) == (8, 4, 3)
    assert "Norms &amp; &lt;more&gt;" in written
    assert "&lt;layer&gt;" in written
    assert "<layer>" not in written


def test_it_needs_nothing_else(written):
    assert re.findall(r"<script|@import|@font-face|<iframe", written) == []
    links = [
        value for _, attributes in Tags(written).seen for name, value in attributes.items() if name in ("src", "href")
    ]
    links += re.findall(r'xlink:href="([^"]*)"|url\(([^)]*)\)', written)
    for link in links:
        text = link if isinstance(link, str) else "".join(link)
        assert text.startswith(("data:", "#")), text


def test_ids_are_not_used_twice_for_different_things(written):
    found = {}
    for tag, body in re.findall(r"<(clipPath|path|image) id=\"([^\"]+)\"[^>]*", written):
        found.setdefault(body, set()).add(tag)
    assert all(len(tags) == 1 for tags in found.values())


def test_it_says_that_norms_are_those_before_clipping(written):
    assert "Every norm on this page is the one before clipping." in written
    assert "prefers-color-scheme:dark" in written
    assert "max-width:640px" in written


def test_notes():
    (every,) = notes(shown(fed([2.0, 3.0])))
    assert every.startswith("100% of the steps that were neither skipped nor NaN were clipped")
    every, broken = notes(shown(fed([2.0, np.nan])))
    assert every.startswith("100% of the steps")
    assert broken.startswith("At 1 of 2 steps the norm was NaN or infinite.")
    (nothing,) = notes(shown(fed([0.5])))
    assert nothing.startswith("Nothing was clipped")
    (some,) = notes(shown(fed([2.0, 0.5, 3.0], capacity=2)))
    assert some.startswith("Pictures and percentiles show the last 2 of 3 steps")
    assert notes(shown(fed([2.0, 0.5]))) == []


@pytest.mark.parametrize(
    ("policies", "capacity", "said"),
    [
        (("skip", "skip"), 9, "They were skipped: their gradients became zeros."),
        (("propagate", "propagate"), 9, '"skip" and "zero" prevent that.'),
        (("skip", "propagate"), 9, '1 of those kept were not skipped. With nonfinite="propagate"'),
        (("propagate", "skip"), 1, "Those that are kept were skipped"),
        (("propagate", "propagate"), 1, '"skip" and "zero" prevent that.'),
    ],
)
def test_what_is_said_of_norms_that_are_not_finite_depends_on_what_was_done(policies, capacity, said):
    monitor = gradclip.Monitor(capacity=capacity)
    for policy in policies:
        monitor.record(np.nan, 1.0, nonfinite=policy)
    note = next(note for note in notes(shown(monitor)) if "NaN or infinite" in note)
    assert said in note
    assert ("prevent" in note) == ("propagate" in policies and said[:5] != "Those")


@pytest.mark.parametrize("name", ["a\udc80b", "a\nb", "a\x00b"])
def test_a_name_that_cannot_be_shown_is_escaped(name, tmp_path):
    monitor = gradclip.Monitor()
    monitor.record(1.0, 2.0, np.ones(2), names=[name, "b"])
    text = monitor.report(tmp_path / "page.html", name).read_text(encoding="utf-8")
    assert text.count(name.encode("unicode_escape").decode()) >= 4
    assert monitor.plot(tmp_path / "picture.png") is not None
    assert name in monitor.top_layers


def test_skipped_steps_are_not_counted_against_all_clipped():
    monitor = gradclip.Monitor()
    monitor.record(np.array([2.0, np.nan]), 1.0, nonfinite="skip")
    monitor.record(900.0, SimpleNamespace(threshold=1.0, skip_above=10.0))
    assert (monitor.clipped, monitor.skipped) == (1, 2)
    assert notes(shown(monitor))[0].startswith("100% of the steps")
    monitor.record(0.5, 1.0)
    assert not notes(shown(monitor))[0].startswith("100% of the steps")


def test_nothing_clipped_is_not_said_of_what_was_skipped_or_nan():
    monitor = gradclip.Monitor()
    monitor.record(np.nan, 1.0)
    assert len(notes(shown(monitor))) == 1
    monitor.record(np.array([0.5, 90.0]), 1.0, skip_above=4.0)
    assert notes(shown(monitor))[0].endswith("above the threshold, except at skipped steps.")


@pytest.mark.filterwarnings("error")
def test_a_page_of_one_step_and_names_of_any_letters():
    monitor = gradclip.Monitor()
    monitor.record(1.0, 2.0, {"层": 1.0, "$b$": 1.0})
    text = page(shown(monitor), "One")
    assert "0.0% of 1 step clipped" in text
    assert text.count("层") == text.count("$b$") == 3


def test_a_page_of_nothing():
    text = page(shown(gradclip.Monitor()), "Empty")
    assert "No step was recorded" in text
    assert Tags(text).open == []
