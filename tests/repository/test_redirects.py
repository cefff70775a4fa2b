"""Old addresses of pages lead to pages that are there."""

import re
import tomllib

import pytest

import redirects
from site_pages import FROM_ROOT, ROOT

MOVED = redirects.redirects()
SOURCES = {str(place): ROOT / name for name, place in FROM_ROOT.items()} | {
    str(page.relative_to(ROOT / "docs")): page for page in (ROOT / "docs").rglob("*.md")
}
NAMED = {str(page.relative_to(ROOT)) for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]}


def headings(text):
    """Return the anchors of a page's headings, and those of the objects that it documents."""
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in re.findall(r"^#+ (.*)$", text, re.M)]
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain} | set(re.findall(r"^::: (\S+)", text, re.M))


def test_each_leads_to_a_page_and_a_heading_that_are_there():
    for old, new in MOVED.items():
        page, _, anchor = new.partition("#")
        assert page in SOURCES, f"{old} leads to {new}"
        assert not anchor or anchor in headings(SOURCES[page].read_text("utf-8")), f"{old} leads to {new}"


def test_no_old_page_is_still_there_or_leads_to_another_old_one():
    assert [old for old in MOVED if old in SOURCES or not old.endswith(".md")] == []
    assert [new for new in MOVED.values() if new.partition("#")[0] in MOVED] == []


def test_nothing_in_the_menu_and_no_link_names_an_old_page():
    menu = re.findall(r'= "([^"]+\.md)"', (ROOT / "zensical.toml").read_text("utf-8"))
    assert [page for page in menu if page in MOVED] == []
    links = re.compile(r"\]\(([^)\s#:]+\.md)")
    for name in NAMED:
        folder = (ROOT / name).parent
        for link in links.findall((ROOT / name).read_text("utf-8")):
            found = (folder / link).resolve()
            assert found.is_file() or not found.is_relative_to(ROOT / "docs"), f"{name}: {link}"


@pytest.mark.parametrize(
    ("old", "new", "link"),
    [
        ("old.md", "how-to/new.md#a-heading", "how-to/new.html#a-heading"),
        ("how-to/old.md", "how-to/new.md", "new.html"),
        ("how-to/old.md", "new.md", "../new.html"),
    ],
)
def test_a_page_sends_its_reader_on(tmp_path, old, new, link):
    redirects.write(tmp_path, {old: new})
    text = (tmp_path / old.replace(".md", ".html")).read_text("utf-8")
    assert f'<meta http-equiv="refresh" content="0; url={link}">' in text
    assert f'<link rel="canonical" href="{link}">' in text
    assert f'<a href="{link}">' in text


def test_the_canonical_address_is_the_public_one_if_there_is_one():
    assert 'rel="canonical" href="https://a.b/docs/new.html">' in redirects.page_for(
        "old.md", "new.md#x", "https://a.b/docs/"
    )


def test_the_list_is_plain_strings(tmp_path, monkeypatch):
    assert all(isinstance(new, str) for new in MOVED.values())
    monkeypatch.setattr(redirects, "LIST", tmp_path / "redirects.toml")
    assert redirects.redirects() == {}
    redirects.LIST.write_text('"a/b.md" = "c.md#d"\n', "utf-8")
    assert redirects.redirects() == tomllib.loads('"a/b.md" = "c.md#d"')
