"""Run the scripts of the gallery, draw their pictures, and write their pages: `gallery.py [NAME ...]`.

A page is what its script says of itself, its picture, what it prints, and its code.
"""

import contextlib
import hashlib
import io
import runpy
import sys
from pathlib import Path
from unittest import mock

import matplotlib
import matplotlib.pyplot as plt

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "examples" / "gallery"
PAGES = ROOT / "docs" / "gallery"
STYLE = SCRIPTS / "matplotlibrc"
# What each picture shows, for those who do not see it.
PICTURES = {
    "loss_spike": "Loss on test images at each step: it jumps twice without clipping, hardly with max_norm=1, "
    "and not at all with skip_above=4",
    "learning_rates": "Test accuracy against learning rate: without clipping it falls above 0.03, with max_norm=1 "
    "above 0.1, with max_norm=0.1 above 0.8",
    "private_epsilon": "Test accuracy against epsilon: it rises up to epsilon 1, and then stays just below that of "
    "training without privacy",
    "hostile_clients": "Test accuracy by round: a server that trusts learns nothing, one that clips and one that "
    "checks learn, the latter a little better",
}


def script_of(name):
    return SCRIPTS / f"{name}.py"


def page_file(name):
    return PAGES / f"{name.replace('_', '-')}.md"


def run(name, picture):
    """Run a script of the gallery; return what it prints."""
    printed = io.StringIO()
    with (
        plt.rc_context(),
        contextlib.redirect_stdout(printed),
        mock.patch.object(sys, "argv", [str(script_of(name)), str(picture)]),
        mock.patch.dict("os.environ", SOURCE_DATE_EPOCH="0"),
    ):
        matplotlib.rc_file(STYLE, use_default_template=False)
        try:
            runpy.run_path(str(script_of(name)))
        finally:
            plt.close("all")
    return printed.getvalue()


def mark_of(name):
    """Return the comment in a picture that says from which code it was drawn."""
    code = script_of(name).read_bytes() + STYLE.read_bytes()
    return f"<!-- drawn by {name}.py, {hashlib.sha256(code).hexdigest()} -->"


def page_of(name, printed):
    """Return the page of a script that printed this."""
    _, told, code = script_of(name).read_text(encoding="utf-8").split('"""', 2)
    title, _, told = told.strip().partition(".\n")
    path = f"../../examples/gallery/{name}.py"
    parts = (
        f"# {title}",
        told.strip(),
        f"![{PICTURES[name]}]({name}.svg)",
        f"It prints:\n\n```\n{printed}```",
        f"[The whole script]({path}):\n\n```python\n{code.strip()}\n```",
    )
    return "\n\n".join(parts) + "\n"


def main(names):
    """Write the pages and pictures of the named scripts."""
    for name in names:
        picture = PAGES / f"{name}.svg"
        page_file(name).write_text(page_of(name, run(name, picture)), encoding="utf-8")
        with picture.open("a", encoding="utf-8") as file:
            file.write(mark_of(name) + "\n")
        print(page_file(name).relative_to(ROOT), picture.stat().st_size, "bytes")


if __name__ == "__main__":
    main(sys.argv[1:] or PICTURES)
