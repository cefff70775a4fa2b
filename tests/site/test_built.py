"""The built site has a mark, a home page and a page for addresses that do not exist. `make docs` runs this."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site" / "html"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
NAV = tomllib.loads((ROOT / "zensical.toml").read_text("utf-8"))["project"]["nav"]
HOME = (SITE / "index.html").read_text("utf-8")
MISSING = (SITE / "404.html").read_text("utf-8")


def content(page):
    return page[page.index('<article class="md-content__inner') : page.index("</article>")]


@pytest.mark.parametrize("page", [HOME, MISSING], ids=["home", "404"])
def test_the_mark_is_the_project_s_own(page):
    icon = re.search(r'<link rel="icon" href="([^"]+)">', page)[1]
    logo = re.search(r'data-md-component="logo">\s*<img src="([^"]+)"', page)[1]
    assert {icon.lstrip("./"), logo.lstrip("./")} == {"assets/mark.svg"}
    assert (SITE / "assets" / "mark.svg").is_file()


def test_the_home_page_says_the_version_and_links_the_repository_if_there_is_one():
    line = re.search(r'<p class="release">(.*?)</p>', HOME, re.S)[1]
    assert f"Version {PROJECT['version']}" in line
    repository = PROJECT.get("urls", {}).get("Repository")
    links = [link for link in re.findall(r'href="([^"]+)"', line) if link.startswith("http")]
    assert links == ([repository] if repository else [])
    assert ("md-source__repository" in HOME) == (repository is not None)


def test_only_the_home_page_has_that_line():
    assert [page.name for page in SITE.rglob("*.html") if 'class="release"' in page.read_text("utf-8")] == [
        "index.html"
    ]


def test_an_address_that_does_not_exist_leads_to_the_search_and_to_every_tab():
    text = content(MISSING)
    assert ".md-search__button" in text
    links = re.findall(r'href="([^"]+)"', text)
    pages = [one if isinstance(one, str) else one[0] for entry in NAV for one in entry.values()]
    assert [link.removeprefix("/") for link in links] == [page.replace(".md", ".html") for page in pages]
