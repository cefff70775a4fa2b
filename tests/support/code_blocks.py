"""The code on a page, and what the page says that it prints."""

import contextlib
import io
import itertools
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import NamedTuple

# Indented ones are in a tab of the site.
BLOCK = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.S | re.M)
# Their code needs a trainer, so tests/trainers/test_pages.py runs it.
WITH_TRAINERS = (
    "docs/how-to/deepspeed-megatron.md",
    "docs/how-to/flower.md",
    "docs/how-to/lora-private.md",
    "docs/how-to/trainers.md",
    "docs/migrate/opacus-gpt2.md",
)
COLUMNS = 80
# Some lines of a block may be highlighted.
PYTHON = re.compile(r'python( hl_lines="[\d ]+")?')
TITLED = re.compile(r'python title="([\w.]+)"')


class Block(NamedTuple):
    """A block of a page: what stands behind its first fence, what is in it, and the plain block right below it."""

    kind: str
    code: str
    below: str | None


def blocks(text):
    """Return the blocks of a page."""
    found = list(BLOCK.finditer(text))
    return [
        Block(this[2], textwrap.dedent(this[3]), _right_below(text, this, after))
        for this, after in itertools.zip_longest(found, found[1:])
    ]


def _right_below(text, this, after):
    if after is None or after[2] or text[this.end() : after.start()].strip():
        return None
    return textwrap.dedent(after[3])


def run(page, alone=False):
    """Run the code on a page, compare what each block prints with the block below it, and return how many there are.

    A block that prints nothing needs none below it. One with a title is a file. Commands in a block of the kind
    "console", each behind a "$", run beside these files, and what they print stands below them in the same block.
    If `alone`, a block knows no names of the blocks above it, and writes its files into the same folder.
    A page shows output as `folded` leaves it, and a long command with backslashes at the ends of its lines.
    """
    names = {}
    checked = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder if alone else "."):
        for block in blocks(page.read_text(encoding="utf-8")):
            if PYTHON.fullmatch(block.kind):
                _compare(block.code, _printed(block.code, {} if alone else names), block.below or "")
            elif title := TITLED.fullmatch(block.kind):
                Path(folder, title[1]).write_text(block.code, encoding="utf-8")
            elif block.kind == "console":
                _run_commands(block.code, folder)
            checked += block.kind.startswith("python")
    return checked


def _printed(code, names):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    return printed.getvalue()


def _run_commands(code, folder):
    for command, output in re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", code, re.M):
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            command,
            shell=True,
            cwd=folder,
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        _compare(command, done.stdout, output)


def folded(text):
    """Return text in 80 columns: longer lines are broken at spaces, and go on two columns to the right."""
    return "".join(f"{part}\n" for line in text.splitlines() for part in _parts(line))


def _parts(line):
    if len(line) <= COLUMNS:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(line, COLUMNS, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False)


def _compare(code, printed, expected):
    printed = folded(printed)
    assert printed == expected, f"the page says\n{expected}\nwhere it prints\n{printed}\nby\n{code}"
