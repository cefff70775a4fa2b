"""The report: one page that stands alone and says what people misread."""

import re
from datetime import UTC, datetime
from html.parser import HTMLParser

import numpy as np
import pytest

import gradclip
from gradclip._src.monitor.page.page import page
from gradclip._src.monitor.records import Overview
from gradclip._src.versions import version_text


def shown(monitor):
    return Overview.of(monitor.records, monitor.counts, monitor.top)


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
    monitor.record(norms, 1.0, layer_norms={"<layer>": norms, "b": norms / 2})
    path = monitor.report(tmp_path_factory.mktemp("page") / "report.html", "Norms & <more>")
    return path.read_text(encoding="utf-8")


def test_the_page_is_whole(written):
    tags = Tags(written)
    assert tags.open == []
    names = [tag for tag, _ in tags.seen]
    assert (names.count("svg"), names.count("figure"), names.count("table")) == (8, 4, 4)
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


@pytest.mark.parametrize("name", ["a\udc80b", "a\nb", "a\x00b"])
def test_a_name_that_cannot_be_shown_is_escaped(name, tmp_path):
    monitor = gradclip.Monitor()
    monitor.record(1.0, 2.0, layer_norms=np.ones(2), names=[name, "b"])
    text = monitor.report(tmp_path / "page.html", name).read_text(encoding="utf-8")
    assert text.count(name.encode("unicode_escape").decode()) >= 4
    assert monitor.plot(tmp_path / "picture.png") is not None
    assert name in monitor.top_layers


@pytest.mark.filterwarnings("error")
def test_a_page_of_one_step_and_names_of_any_letters():
    monitor = gradclip.Monitor()
    monitor.record(1.0, 2.0, layer_norms={"层": 1.0, "$b$": 1.0})
    text = page(shown(monitor), "One")
    assert "0 of 1 step clipped (0.0%)" in text
    assert text.count("层") == text.count("$b$") == 3


def test_a_page_of_nothing():
    text = page(shown(gradclip.Monitor()), "Empty")
    assert "No step was recorded" in text
    assert Tags(text).open == []


def facts(text):
    return dict(re.findall(r"<div><dt>(.*?)</dt><dd>(.*?)</dd></div>", text[: text.index("class='tiles'")]))


def test_the_page_says_when_by_which_version_and_policy_and_of_which_run(tmp_path):
    monitor = gradclip.Monitor()
    monitor.record(1.0, 2.0, nonfinite="drop", skip_above=4.0)
    date = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
    context = {"seed": 0, "<b>": "x" * 300, "\x00": None}
    path = monitor.report(tmp_path / "a.html", context=context, date=date)
    text = path.read_text(encoding="utf-8")
    assert facts(text) == {
        "written": "2026-01-02 03:04 UTC",
        "by": version_text(),
        "policy": "nonfinite=&quot;drop&quot;, skip_above=4",
        "seed": "0",
        "&lt;b&gt;": "x" * 199 + "…",
        "\\x00": "None",
    }
    assert text == page(
        monitor._overview(), "What gradient clipping did", {"seed": 0, "<b>": "x" * 300, "\x00": None}, date
    )


def test_the_date_is_now_and_the_policy_is_that_of_the_last_call():
    monitor = gradclip.Monitor()
    assert facts(page(monitor._overview(), "a")).keys() == {"written", "by"}
    for policy in ("drop", "zero"):
        monitor.record(1.0, 2.0, nonfinite=policy)
    told = facts(page(monitor._overview(), "a"))
    assert told["policy"] == "nonfinite=&quot;zero&quot;"
    assert told["written"].startswith(str(datetime.now().year))


def test_what_is_no_context_is_an_error(tmp_path):
    with pytest.raises(TypeError, match=r"context must be a dict of names and values, got 'seed 0' of type str\."):
        gradclip.Monitor().report(tmp_path / "a.html", context="seed 0")
    assert list(tmp_path.iterdir()) == []


def test_the_proposed_threshold_is_the_first_tile():
    monitor = gradclip.Monitor()
    monitor.record(np.full(100, 0.5), 2.0)
    text = page(monitor._overview(), "a")
    first = text[text.index("class='tiles'") :]
    assert re.search(r"<dt>(.*?)</dt><dd>(.*?) *<", first).groups() == (
        "proposed threshold",
        f"{monitor.advise().max_norm:g}",
    )
    assert "none yet" in page(gradclip.Monitor()._overview(), "a")
