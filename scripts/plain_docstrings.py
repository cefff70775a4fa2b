"""Convert plain-text docstrings to Markdown for the documentation site."""

import re
import textwrap

import griffe

# A doctest with its output, up to an empty line or the end. Markdown would render it as a quotation.
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n.+)*", re.M)
# A "Raises" section consists of sentences, often about several errors, not of a list of names.
RAISES = re.compile(r"^Raises:\n((?: +.*\n?|\n(?= ))+)", re.M)
CODE = re.compile(r"(```.*?```|`[^`]+`)", re.S)
# Powers, norms and "greater than". Markdown would render them as bold text, columns and a quotation.
FORMULA = re.compile(r"\*\*|\|\||(?<=: )>")


def as_markdown(docstring):
    """Return a docstring as Markdown."""
    fenced = EXAMPLE.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", docstring)
    listed = RAISES.sub(lambda found: f"**Raises:** {textwrap.dedent(found[1])}", fenced)
    heading, raises, errors = listed.partition("**Raises:**")
    return _escaped(heading) + raises + _escaped(errors)


def _escaped(text):
    escape = lambda found: "".join(f"\\{character}" for character in found[0])
    return "".join(part if i % 2 else FORMULA.sub(escape, part) for i, part in enumerate(CODE.split(text)))


class PlainDocstrings(griffe.Extension):
    """Pass every docstring to griffe as Markdown."""

    def on_object(self, *, obj, **kwargs):
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
