"""For the site: parts of docstrings that are no sections of griffe's are shown as what they are."""

import re
import textwrap

import griffe

# Doctests, which Markdown would take for quotations, with what they print: up to an empty line or to the end.
EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.M)
# They are sentences, often of several errors at once.
RAISES = re.compile(r"^Raises:\n((?: +.*\n?|\n(?= ))+)", re.M)


def _sentences(found):
    return f"**Raises:** {textwrap.dedent(found[1])}"


class DocstringExamples(griffe.Extension):
    """Fence the doctests of every docstring, and leave its errors as they are written."""

    def on_object(self, *, obj, **kwargs):
        if obj.docstring:
            fenced = EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
            obj.docstring.value = RAISES.sub(_sentences, fenced)
