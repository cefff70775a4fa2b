"""Old addresses of the built site lead to pages that are there, and only links of old lead to them."""

import json
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site" / "html"
LIST = ROOT / "docs" / "redirects.toml"
MOVED = tomllib.loads(LIST.read_text("utf-8")) if LIST.exists() else {}


@pytest.mark.parametrize("old", MOVED)
def test_each_leads_to_a_page_and_an_anchor_that_are_there(old):
    page = SITE / old.replace(".md", ".html")
    link = re.search(r'<a href="([^"]+)">', page.read_text("utf-8"))[1]
    path, _, anchor = link.partition("#")
    target = page.parent / path
    assert target.is_file()
    assert not anchor or f'id="{anchor}"' in target.read_text("utf-8")


def test_the_search_finds_none_and_no_page_links_to_one():
    old = {page.replace(".md", ".html") for page in MOVED}
    items = json.loads((SITE / "search.json").read_text("utf-8"))["items"]
    assert old & {item["location"].partition("#")[0] for item in items} == set()
    for page in SITE.rglob("*.html"):
        for link in re.findall(r'href="([^":#]+\.html)', page.read_text("utf-8")):
            found = (page.parent / link).resolve()
            assert not found.is_relative_to(SITE) or str(found.relative_to(SITE)) not in old, f"{page}: {link}"
