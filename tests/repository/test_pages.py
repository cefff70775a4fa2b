"""The pages of the site name everything that is public, and load nothing from elsewhere."""

import importlib
import re
import sys
import tomllib
from types import SimpleNamespace

import gradclip
import site_pages
import tested_with
from site_pages import ROOT

TEXTS = {str(page.relative_to(ROOT)): page.read_text("utf-8") for page in sorted((ROOT / "docs").rglob("*.md"))}
SETTINGS = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
BESIDE_THE_MENU = {"parity.md"}  # long results, for those who follow a link
REFERENCE = "".join(text for name, text in TEXTS.items() if name.startswith("docs/reference/"))


def test_every_public_name_is_in_the_reference_once():
    shown = re.findall(r"^::: gradclip\.(\w+)$", REFERENCE, re.M)
    assert sorted(shown) == sorted(gradclip.__all__)
    overview = TEXTS["docs/reference/index.md"]
    assert [name for name in gradclip.__all__ if f"`{name}`" not in overview and f"`{name}," not in overview] == []


def test_the_page_of_libraries_has_what_is_tested_and_pinned():
    assert TEXTS["docs/tested-with.md"] == tested_with.page()


def test_every_integration_is_in_the_reference():
    folder = ROOT / "src" / "gradclip" / "integrations"
    modules = {path.stem for path in folder.glob("[!_]*.py")}
    assert set(re.findall(r"^::: gradclip\.integrations\.(\w+)$", REFERENCE, re.M)) == modules


def test_the_page_of_environment_variables_names_those_that_are_read():
    sources = [*(ROOT / "src").rglob("*.py"), ROOT / "pyproject.toml"]
    read = {found for path in sources for found in re.findall(r"GRADCLIP_[A-Z_]+|OMP_[A-Z_]+", path.read_text("utf-8"))}
    assert read == set(re.findall(r"^\| `(\w+)`", TEXTS["docs/reference/environment.md"], re.M))


def test_docstrings_are_shown_as_they_are_written(monkeypatch):
    # It is an extension of griffe, which is installed where the site is built.
    monkeypatch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object))
    shown = importlib.import_module("plain_docstrings").as_markdown
    assert shown("Sum of C**2.\n\n>>> 2**2\n4\n") == "Sum of C\\*\\*2.\n\n```pycon\n>>> 2**2\n4\n```\n"
    assert shown("| ||g|| | `a**b` |") == "| \\|\\|g\\|\\| | `a**b` |"
    assert (
        shown("Raises:\n    ValueError: no, or\n    never.\n\nMore.")
        == "**Raises:** `ValueError`: no, or\nnever.\n\nMore."
    )
    assert (
        shown("Raises:\n    TypeError, ValueError: a, or\n    b. UserWarning: c. Other errors are e.")
        == "**Raises:**\n\n- `TypeError`, `ValueError`: a, or\n  b.\n- `UserWarning`: c.\n- Other errors are e."
    )
    assert shown("Returns:\n    A pair: x**2.\n\nMore.") == "**Returns:** A pair: x\\*\\*2.\n\nMore."
    assert shown("**It recovers.** K**2") == "**It recovers.** K\\*\\*2"
    assert shown("Example:\n    >>> 1\n    1") == "Example:\n    ```pycon\n    >>> 1\n    1\n    ```"
    assert shown("Args:\n    gamma: > 0") == "Args:\n    gamma: \\> 0"


def test_what_is_proven_about_private_training_rests_on_lines_that_are_there():
    rows = re.findall(r"^\| .* \| .* \| `(.+)` \| `(\S+)` \|$", TEXTS["docs/explanation/sensitivity.md"], re.M)
    missing = [row for row in rows if row[0] not in (ROOT / "src" / "gradclip" / "_src" / row[1]).read_text("utf-8")]
    assert len(rows) == 14
    assert missing == []


def named_in(entries):
    for entry in entries:
        for value in [entry] if isinstance(entry, str) else entry.values():
            yield from [value] if isinstance(value, str) else named_in(value)


def test_every_page_can_be_reached_from_the_menu():
    from_root = {str(path) for path in site_pages.FROM_ROOT.values()}
    pages = {name.removeprefix("docs/") for name in TEXTS} | from_root
    assert sorted(named_in(SETTINGS["nav"])) == sorted(pages - BESIDE_THE_MENU)
    for page in BESIDE_THE_MENU:
        assert all(f"{page})" in TEXTS[name] for name in ("docs/differences.md", "docs/migrate/index.md"))


def test_links_lead_within_the_site(tmp_path):
    site_pages.stage(tmp_path)
    broken = [
        f"{page.relative_to(tmp_path)}: {found[2]}"
        for page in tmp_path.rglob("*.md")
        if page.parts[len(tmp_path.parts)] != "files"
        for found in site_pages.LINK.finditer(page.read_text("utf-8"))
        if not (page.parent / found[2]).is_file()
    ]
    assert broken == []
    assert "clip_grad_norm_" in (tmp_path / "files" / "examples" / "fsdp2.py.md").read_text("utf-8")


def test_nothing_is_loaded_from_elsewhere_unless_it_is_found():
    assert SETTINGS["theme"]["font"] is False
    page = '<link rel="canonical" href="https://a.b/"><a href="https://a.b/">x</a><img src="x.png">'
    assert site_pages.loaded_elsewhere("index.html", page) == []
    for bad in (
        '<script src="https://a.b/c.js"></script>',
        '<link rel="stylesheet" href="//a.b/c">',
        '<img src="x.png" srcset="https://a.b/c 2x">',
        "<style>@import 'https://a.b/c'</style>",
        '<p style="background: url(https://a.b/c)">',
    ):
        assert len(site_pages.loaded_elsewhere("index.html", page + bad)) == 1, bad
    assert site_pages.loaded_elsewhere("a.css", "a{background:url('https://a.b/c')} b{background:url(x.png)}") == [
        "https://a.b/c"
    ]


def test_no_registry_is_named():
    hosts = re.compile(r"(pypi|pythonhosted|anaconda|npmjs|rubygems|crates)\s*\.\s*(org|io|com)")
    folders = ("docs", "src", "scripts", "tests", "examples", "benchmarks", ".github")
    files = [
        *ROOT.glob("*.md"),
        *ROOT.glob("*.toml"),
        ROOT / "Makefile",
        *(p for f in folders for p in (ROOT / f).rglob("*")),
    ]
    texts = [
        path for path in files if path.suffix in ("", ".md", ".toml", ".py", ".yml", ".yaml", ".cff") and path.is_file()
    ]
    assert [str(path) for path in texts if hosts.search(path.read_text(encoding="utf-8"))] == []


def test_the_version_is_the_same_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert importlib.import_module("gradclip").__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
