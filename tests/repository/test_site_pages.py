"""The pages of the site lead to each other, and what they say about the project is what pyproject.toml says."""

import re
import tomllib

import pytest

import install_table
import site_pages
from site_pages import ROOT

DOCS = ROOT / "docs"
TEXT = (ROOT / "zensical.toml").read_text("utf-8")
TABS = {name: pages for entry in tomllib.loads(TEXT)["project"]["nav"] for name, pages in entry.items()}
OVERVIEWS = {name: pages for name, pages in TABS.items() if isinstance(pages, list)}
PAGES = [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in site_pages.FROM_ROOT)]
LINKED = re.compile(r"(?<!!)\[((?:`[^`]*`|[^][`])+)\]\([^)\s]+\)")
LINE = re.compile(r"^- \[[^]]+\]\(([^)#]+)\): \S.*\.$", re.M)
PROJECT = {"name": "gradclip", "version": "9.8.7", "license": "Apache-2.0"}


@pytest.mark.parametrize("tab", OVERVIEWS)
def test_each_tab_opens_with_one_line_for_each_of_its_pages(tab):
    overview, *others = OVERVIEWS[tab]
    source = DOCS / overview
    listed = [site_pages.place((source.parent / link).resolve()) for link in LINE.findall(source.read_text("utf-8"))]
    assert [str(page) for page in listed] == [page for other in others for page in other.values()]


def test_the_home_page_leads_to_four_jobs_and_every_overview():
    text = (DOCS / "index.md").read_text("utf-8")
    cards = text[text.index('<div class="cards"') : text.index("## Quickstart")]
    assert cards.count("<div markdown>") == len(LINKED.findall(cards)) == 4
    for overview in ("install.md", *(pages[0] for pages in OVERVIEWS.values())):
        assert f"]({overview})" in text, overview


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_are_words(page):
    texts = [found[1] for found in LINKED.finditer(page.read_text("utf-8"))]
    assert [text for text in texts if re.search(r"\.(md|json|py)`?$", text)] == []
    # On this page a link quotes a reason from another page.
    if page.name != "parity.md":
        assert [text for text in texts if "," in re.sub(r"`[^`]*`", "", text)] == []


def test_the_page_on_installation_says_what_pyproject_says():
    project = install_table.project()
    assert install_table.current() == install_table.table(project)
    assert set(project["optional-dependencies"]) == set(install_table.USES) | install_table.OURS
    assert f"needs {install_table.pythons(project)}." in install_table.PAGE.read_text("utf-8")


def test_the_table_of_what_to_install_follows_the_extras():
    extras = {extra: [] for extra in install_table.USES} | {
        "tensorboard": ["gradclip[jax,cli,plot]", "x>=2,<3; y == 'z'"]
    }
    table = install_table.table({"dependencies": ["numpy>=1.26"], "optional-dependencies": extras})
    assert table.splitlines()[2].endswith("| none | numpy >=1.26 |")
    assert table.splitlines()[-1].endswith("| `tensorboard` | what jax, cli and plot install, x >=2,<3 |")


def test_without_addresses_the_site_has_no_links_to_them():
    found = tomllib.loads(site_pages.settings(TEXT, PROJECT))["project"]
    assert found.keys() - tomllib.loads(TEXT)["project"].keys() == {"copyright"}
    assert found["copyright"] == "gradclip 9.8.7, Apache-2.0"
    assert (found["extra"]["release"], found["extra"]["licence"]) == ("9.8.7", "Apache-2.0")


def test_the_site_takes_its_addresses_from_pyproject():
    urls = {"Repository": "https://example.org/gradclip", "Documentation": "https://example.org/docs/"}
    found = tomllib.loads(site_pages.settings(TEXT, {**PROJECT, "urls": urls}))["project"]
    assert (found["repo_url"], found["repo_name"]) == (urls["Repository"], "gradclip")
    assert found["site_url"] == urls["Documentation"]
    given = tomllib.loads(TEXT)["project"]
    assert given.keys() & {"repo_url", "repo_name", "site_url"} == set()


def test_the_citation_names_the_same_repository():
    repository = install_table.project().get("urls", {}).get("Repository")
    named = re.findall(r"^repository-code: (.*)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.M)
    assert named == ([repository] if repository else [])
