"""Pages at addresses that the site once had, which send a reader on: docs/redirects.toml says where to.

They are written next to the built pages, so neither the menu nor the search knows them.
"""

import html
import tomllib
from os.path import relpath
from pathlib import Path, PurePosixPath

LIST = Path(__file__).resolve().parent.parent / "docs" / "redirects.toml"
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>This page has moved</title>
<link rel="canonical" href="{canonical}">
<meta name="robots" content="noindex">
<meta http-equiv="refresh" content="0; url={link}">
</head>
<body>
<p>This page has moved: <a href="{link}">{link}</a></p>
</body>
</html>
"""


def redirects():
    """Return the new place of each old page, as in `{"how-to/old.md": "how-to/new.md#heading"}`."""
    return tomllib.loads(LIST.read_text("utf-8")) if LIST.exists() else {}


def address(page):
    """Return where the site has a page: `a/b.md#c` is at `a/b.html#c`."""
    path, anchor, name = page.partition("#")
    return str(PurePosixPath(path).with_suffix(".html")) + anchor + name


def page_for(old, new, site_url=""):
    """Return the HTML at an old address. Its links are relative, and so is the canonical one without `site_url`."""
    link = html.escape(relpath(address(new), PurePosixPath(old).parent))
    canonical = html.escape(site_url.rstrip("/") + "/" + address(new).partition("#")[0]) if site_url else link
    return PAGE.format(link=link, canonical=canonical)


def write(built, moved, site_url=""):
    """Write the page of each old address into the built site."""
    for old, new in moved.items():
        target = built / address(old)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page_for(old, new, site_url), "utf-8")
