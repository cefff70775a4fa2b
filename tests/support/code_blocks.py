"""The code on a page, and what the page says that it prints."""

import contextlib
import io
import itertools
import re


def run(page):
    """Run the code on a page, compare what each block prints with the block below it, and return how many there are."""
    blocks = re.findall(r"^```(python|)\n(.*?)^```", page.read_text(), re.S | re.M)
    names = {}
    checked = 0
    for (kind, code), (next_kind, output) in itertools.pairwise(blocks):
        if kind == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(code, names)
            assert next_kind == "", f"no output stands below\n{code}"
            assert printed.getvalue() == output, f"the page says\n{output}\nwhere it prints\n{printed.getvalue()}"
            checked += 1
    return checked
