"""Build the documentation site: `make docs`.

Pages link to files outside `docs`: examples, results, sources. The site includes those files as pages, so every link
stays within the site. Sources are collected in build/site/docs and built into build/site/html.
"""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from os.path import relpath
from pathlib import Path

import redirects

ROOT = Path(__file__).resolve().parent.parent
STAGED = ROOT / "build" / "site" / "docs"
BUILT = ROOT / "build" / "site" / "html"
SETTINGS = ROOT / "build" / "site" / "zensical.toml"
# Pages at the root of the repository, where people look for them.
FROM_ROOT = {
    name: Path("help") / f"{name.lower().removesuffix('.md').replace('_', '-')}.md"
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
}
# The site has these as they are. Other files become pages.
PLAIN = (".md", ".png", ".svg", ".json")
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
# Sources have lines of up to 120 columns: their pages leave out what stands beside the text.
WIDE = "hide: [navigation, toc]\n"
# Each of its rows has the words that people search for, and answers none of them.
RESULTS = Path("docs/parity.md")
NOT_SEARCHED = "search:\n  exclude: true\n"
QUOTES = '"""'
LANGUAGES = {".py": "python", ".toml": "toml", ".cpp": "cpp", ".hpp": "cpp"}


def place(source):
    """Return the path of a repository file in the site, relative to the site's root."""
    path = source.relative_to(ROOT)
    if path.parts[0] == "docs":
        return Path(*path.parts[1:])
    if str(path) in FROM_ROOT:
        return FROM_ROOT[str(path)]
    return Path("files") / (path if path.suffix in PLAIN else f"{path}.md")


def page_of(source):
    """Return a page that shows a file, or lists the files of a folder."""
    name = source.relative_to(ROOT)
    if source.is_dir():
        rows = [f"- [{found.name}]({found.name})" for found in sorted(source.iterdir()) if found.is_file()]
        return f"{_front(NOT_SEARCHED)}# {name}\n\n" + "\n".join(rows) + "\n"
    if source.suffix == ".md":
        before = _front(NOT_SEARCHED) if name == RESULTS else ""
        return before + source.read_text(encoding="utf-8")
    text = source.read_text(encoding="utf-8")
    described = re.match(r'"""(.+)', text) if source.suffix == ".py" else None
    short = f"**In short:** {described[1].removesuffix(QUOTES)}\n\n" if described else ""
    return f"{_front(WIDE + NOT_SEARCHED)}# {name}\n\n{short}```{LANGUAGES.get(source.suffix, '')}\n{text}\n```\n"


def _front(settings):
    """Return what stands above the text of a page: its settings."""
    return f"---\n{settings}---\n\n"


class Stage:
    """The folder that the site is built from, with the pages and everything that they link to."""

    def __init__(self, folder):
        self.folder = folder
        self.done = set()

    def add(self, source):
        """Copy a repository file, and everything that it links to, into the folder once."""
        if source in self.done:
            return
        self.done.add(source)
        target = self.folder / place(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix != ".md":
            shutil.copyfile(source, target)
            return
        base = source if source.is_dir() else source.parent
        follow = source.is_dir() or source.suffix == ".md"
        text = page_of(source)
        target.write_text(LINK.sub(lambda found: self._linked(found, base, target), text) if follow else text, "utf-8")

    def _linked(self, found, base, target):
        """Return a link, adapted to the new place of its page."""
        before, link, anchor, after = found.groups()
        source = (base / link).resolve()
        if not source.is_relative_to(ROOT) or not source.exists():
            return found[0]
        self.add(source)
        return f"{before}{relpath(self.folder / place(source), target.parent)}{anchor or ''}{after}"


def stage(folder=STAGED):
    """Collect all pages in `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = Stage(folder)
    for name in FROM_ROOT:
        pages.add(ROOT / name)
    for source in sorted((ROOT / "docs").rglob("*")):
        if source.is_file() and source.suffix != ".toml":
            pages.add(source)


def settings(text, project):
    """Return the settings of the site, with the version and the public addresses that pyproject.toml states.

    `[project.urls]` is the one place for addresses. Without them, the site shows no link.
    """
    urls = project.get("urls", {})
    added = {
        "copyright": f"{project['name']} {project['version']}, {project['license']}",
        "extra.licence": project["license"],
        "extra.release": project["version"],
    }
    if "Repository" in urls:
        added |= {"repo_url": urls["Repository"], "repo_name": project["name"]}
    if "Documentation" in urls:
        added["site_url"] = urls["Documentation"]
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in added.items())
    return text.replace("[project]\n", f"[project]\n{lines}", 1)


class _Loads(HTMLParser):
    """Collect what a page makes a browser load, without the links that a reader may click."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed", "input"):
            self.found += [values.get("src"), values.get("srcset"), values.get("poster")]
        if tag == "object":
            self.found.append(values.get("data"))
        if tag == "link" and values.get("rel") not in ("canonical", "alternate", "next", "prev", "license"):
            self.found.append(values.get("href"))
        self.found += _loaded_by_style(values.get("style") or "")


def _loaded_by_style(css):
    return re.findall(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", css)


def loaded_elsewhere(name, text):
    """Return what a file of the site would load from a different host: resources of HTML, imports of CSS."""
    if name.endswith(".html"):
        parser = _Loads()
        parser.feed(text)
        inline = re.findall(r"<style[^>]*>(.*?)</style>", text, re.S)
        found = parser.found + [pair for css in inline for pair in _loaded_by_style(css)]
    elif name.endswith(".css"):
        found = _loaded_by_style(text)
    else:
        found = []
    addresses = ["".join(one) if isinstance(one, tuple) else one or "" for one in found]
    return [address for address in addresses if re.match(r"\s*(https?:)?//", address)]


def main():
    """Build the site with warnings as errors, and fail if it would load anything from other hosts."""
    stage()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    SETTINGS.write_text(settings((ROOT / "zensical.toml").read_text("utf-8"), project), "utf-8")
    program = Path(sys.executable).parent / "zensical"
    subprocess.run([program, "build", "--clean", "--strict", "-f", SETTINGS], cwd=ROOT, check=True)
    redirects.write(BUILT, redirects.redirects(), project.get("urls", {}).get("Documentation", ""))
    elsewhere = {
        str(path.relative_to(BUILT)): loads
        for path in sorted(BUILT.rglob("*"))
        if path.suffix in (".html", ".css") and (loads := loaded_elsewhere(path.name, path.read_text("utf-8")))
    }
    if elsewhere:
        sys.exit(f"loaded from other hosts: {elsewhere}")
    print(f"{len(list(BUILT.rglob('*.html')))} pages, nothing loaded from other hosts: {BUILT / 'index.html'}")


if __name__ == "__main__":
    main()
