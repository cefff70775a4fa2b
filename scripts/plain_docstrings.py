"""Convert plain-text docstrings to Markdown for the documentation site."""

import re
import textwrap

import griffe

# A doctest with its output, up to an empty line or the end. Markdown would render it as a quotation.
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n.+)*", re.M)
# The sections "Returns" and "Raises" consist of sentences. griffe would read what is before a colon as a type.
SENTENCES = re.compile(r"^(Returns|Raises):\n((?: +.*\n?|\n(?= ))+)", re.M)
# The places in "Raises" where the next errors begin.
NEXT_ERRORS = re.compile(r"(?:^|(?<=\.)\s+)(?=(?:[A-Z]\w+(?:Error|Warning)(?:, )?)+:|Other errors are )")
ERRORS = re.compile(r"^(?:[A-Z]\w+(?:, )?)+(?=:)")
CODE = re.compile(r"(```.*?```|`[^`]+`|^ *\*\*[A-Z][^*\n]+[.:]\*\*)", re.S | re.M)
# Powers, norms and "greater than". Markdown would render them as bold text, columns and a quotation.
# What is already Markdown stays: code, and words in bold.
FORMULA = re.compile(r"\*\*|\|\||(?<=: )>")


def as_markdown(docstring):
    """Return a docstring as Markdown."""
    fenced = EXAMPLE.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", docstring)
    return _escaped(SENTENCES.sub(_as_paragraphs, fenced))


def _as_paragraphs(section):
    """Return a section of sentences as a paragraph, or as a list if it names several errors."""
    name, text, end = section[1], textwrap.dedent(section[2]).rstrip(), "\n" if section[2].endswith("\n") else ""
    if name == "Returns":
        return f"**Returns:** {text}{end}"
    quoted = lambda found: re.sub(r"\w+", r"`\g<0>`", found[0])
    parts = [ERRORS.sub(quoted, part) for part in NEXT_ERRORS.split(text) if part]
    if len(parts) == 1:
        return f"**Raises:** {parts[0]}{end}"
    return "**Raises:**\n\n" + "\n".join("- " + part.replace("\n", "\n  ") for part in parts) + end


def _escaped(text):
    escape = lambda found: "".join(f"\\{character}" for character in found[0])
    return "".join(part if i % 2 else FORMULA.sub(escape, part) for i, part in enumerate(CODE.split(text)))


class PlainDocstrings(griffe.Extension):
    """Pass every docstring to griffe as Markdown."""

    def on_object(self, *, obj, **kwargs):
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
