"""Open every page of the built site in Chromium, and fail if a reader would not see all of it: `make look`.

- No line of code has more than 80 columns, except on the pages that show whole source files.
- In a window of 1,400 pixels, no table and no code is wider than its page.
- In narrower windows, they scroll in boxes of their own. A shadow shows that there is more, and a table's first column
  stays, within 60% of the box.
- The page itself never scrolls sideways.
- A page longer than five screens begins with a paragraph "In short".
"""

import contextlib
import functools
import http.server
import json
import sys
import threading

import redirects
from browser import Page
from site_pages import BUILT

WIDTHS = (1400, 686, 400)
SCREEN = 900
SCREENS = 5
COLUMNS = 80
# Functions of JavaScript. The first returns what is wrong at the window's width, as a list of sentences.
FAULTS = r"""wide => {
  const wrong = [], text = e => e.innerText.trim().replace(/\s+/g, ' ').slice(0, 50);
  const article = document.querySelector('article'), root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) wrong.push(`the page is ${root.scrollWidth} pixels wide`);
  const box = e => {
    while (e !== article && !['auto', 'scroll'].includes(getComputedStyle(e).overflowX)) e = e.parentElement;
    return e;
  };
  const has_cue = e => getComputedStyle(e).backgroundAttachment.includes('local');
  const shown = e => e.getClientRects().length > 0;
  for (const code of [...article.querySelectorAll('pre > code')].filter(shown)) {
    if (code.scrollWidth <= code.clientWidth) continue;
    if (wide) wrong.push(`code is ${code.scrollWidth} pixels wide in ${code.clientWidth}: ${text(code)}`);
    else if (!has_cue(code)) wrong.push(`code scrolls without a cue: ${text(code)}`);
  }
  for (const table of [...article.querySelectorAll('table')].filter(shown)) {
    const around = box(table), edge = around.getBoundingClientRect();
    if (around === article && table.getBoundingClientRect().right > edge.right + 1)
      wrong.push(`a table is cut off: ${text(table)}`);
    if (around === article || around.scrollWidth <= around.clientWidth) continue;
    const size = `${around.scrollWidth} pixels wide in ${around.clientWidth}`;
    if (wide) wrong.push(`a table is ${size}: ${text(table)}`);
    if (!has_cue(around)) wrong.push(`a table scrolls without a cue: ${text(table)}`);
    around.scrollLeft = 1e6;
    const first = table.querySelector('tbody tr > *').getBoundingClientRect();
    if (first.left < edge.left - 1) wrong.push(`the first column scrolls away: ${text(table)}`);
    if (first.width > 0.6 * edge.width)
      wrong.push(`the first column fills ${first.width | 0} pixels of ${edge.width | 0}: ${text(table)}`);
    around.scrollLeft = 0;
  }
  return wrong;
}"""
LINES = "() => [...document.querySelectorAll('article pre > code')].flatMap(code => code.textContent.split('\\n'))"
# Folded parts and tabs are seen too.
UNFOLD = """() => {
  for (const folded of document.querySelectorAll('details')) folded.open = true;
  for (const tab of document.querySelectorAll('.tabbed-block')) tab.style.display = 'block';
}"""
HEIGHT = "() => document.documentElement.scrollHeight"
HAS_SUMMARY = """() => {
  const below = document.querySelector('article h1')?.nextElementSibling;
  return below?.tagName === 'P' && below.innerText.startsWith('In short');
}"""


def asked(page, function, *values):
    return page.run(f"({function})({json.dumps(values)[1:-1]})")


def faults(page, address):
    """Yield what is wrong with one page."""
    page.size(WIDTHS[0], SCREEN)
    page.open(address)
    for line in asked(page, LINES):
        if len(line) > COLUMNS and "/files/" not in address:
            yield f"code of {len(line)} columns: {line.strip()}"
    screens = asked(page, HEIGHT) / SCREEN
    if screens > SCREENS and not asked(page, HAS_SUMMARY):
        yield f'{screens:.1f} screens long, and the first paragraph does not begin with "In short"'
    asked(page, UNFOLD)
    for width in WIDTHS:
        page.size(width, SCREEN)
        yield from (f"at {width} pixels {fault}" for fault in asked(page, FAULTS, width == WIDTHS[0]))


def check_that_faults_are_found(page):
    """Stop if a page with each of the faults passes."""
    cells = "".join(f"<td>{name * 60}</td>" for name in "ab")
    scrolls = "style='display: block; overflow: auto; width: 90px'"
    body = (
        f"<article><h1>x</h1><p>Long.</p><pre><code {scrolls}>{'c' * 81}</code></pre>"
        f"<div {scrolls}><table><tbody><tr>{cells}</tr></tbody></table></div>"
        f"<details><table><tbody><tr>{cells * 3}</tr></tbody></table></details>"
        f"<div style='height: {SCREEN * SCREENS}px'></div></article>"
    )
    found = "\n".join(faults(page, f"data:text/html,{body}"))
    for fault in (
        "code of 81 columns",
        "screens long",
        "at 1400 pixels code is",
        "at 1400 pixels a table is cut off",
        "at 1400 pixels the page is",
        "at 400 pixels code scrolls without a cue",
        "at 400 pixels a table scrolls without a cue",
        "at 400 pixels the first column scrolls away",
        "at 400 pixels the first column fills",
    ):
        if fault not in found:
            sys.exit(f"a page on which {fault!r} should be found passes. Found:\n{found}")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextlib.contextmanager
def served(folder):
    """Serve a folder to this machine, and give its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def main():
    moved = {redirects.address(old) for old in redirects.redirects()}
    built = (str(path.relative_to(BUILT)) for path in sorted(BUILT.rglob("*.html")))
    names = sys.argv[1:] or [name for name in built if name not in moved]
    with Page() as page, served(BUILT) as site:
        check_that_faults_are_found(page)
        found = [f"{name}: {fault}" for name in names for fault in faults(page, f"{site}/{name}")]
    if found:
        sys.exit("\n".join([*found, f"{len(found)} faults on {len(names)} pages"]))
    print(f"{len(names)} pages fit windows of {', '.join(map(str, WIDTHS))} pixels")


if __name__ == "__main__":
    main()
