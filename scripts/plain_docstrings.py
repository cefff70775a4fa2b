"""For the site: docstrings are plain text, and here become the Markdown that shows the same."""

import re
import textwrap

import griffe

# Doctests, which Markdown would take for quotations, with what they print: up to an empty line or to the end.
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n.+)*", re.M)
# They are sentences, often of several errors at once, and no list of names.
RAISES = re.compile(r"^Raises:\n((?: +.*\n?|\n(?= ))+)", re.M)
CODE = re.compile(r"(```.*?```|`[^`]+`)", re.S)
# Powers, norms and "greater than", where Markdown would see bold text, columns and a quotation.
FORMULA = re.compile(r"\*\*|\|\||(?<=: )>")


def as_markdown(docstring):
    """Return the Markdown that shows a docstring as it is meant."""
    fenced = EXAMPLE.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", docstring)
    listed = RAISES.sub(lambda found: f"**Raises:** {textwrap.dedent(found[1])}", fenced)
    heading, raises, errors = listed.partition("**Raises:**")
    return _escaped(heading) + raises + _escaped(errors)


def _escaped(text):
    escape = lambda found: "".join(f"\\{character}" for character in found[0])
    return "".join(part if i % 2 else FORMULA.sub(escape, part) for i, part in enumerate(CODE.split(text)))


class PlainDocstrings(griffe.Extension):
    """Give every docstring to griffe as Markdown."""

    def on_object(self, *, obj, **kwargs):
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
