"""Print every public call with its arguments: `python scripts/arguments.py`; `--write` puts it into the reference."""

import inspect
import re
import sys
from importlib import import_module
from pathlib import Path

import gradclip

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "arguments.md"
MARKS = ("<!-- table: written by scripts/arguments.py -->\n", "<!-- end of table -->")
LIBRARIES = ("brainstate", "declearn", "jax_privacy", "keras", "lucid", "mlx", "optax", "tensorflow")
MODULES = tuple(f"gradclip.integrations.{name}" for name in ("torch", *LIBRARIES))
"""Those that import in the environment of the tests, PyTorch before TensorFlow. Callbacks and Flower need others."""
RESULTS = ("ClippedFunction", "MaxNormSearch", "NativeStatus", "PartialNorm", "SensitivityReport", "UpdateCheck")
"""Classes whose objects calls return, beside the named tuples: nobody else makes them."""


def functions(module):
    """Return the functions and classes of a module's `__all__` that users call."""
    each = {name: getattr(module, name) for name in module.__all__}
    return {name: one for name, one in each.items() if callable(one) and not is_result(one)}


def is_result(one):
    return isinstance(one, type) and (issubclass(one, tuple | Exception) or one.__name__ in RESULTS)


def methods():
    """Return the public methods of gradclip's classes."""
    found = {}
    for name in gradclip.__all__:
        kind = getattr(gradclip, name)
        if not isinstance(kind, type) or issubclass(kind, Exception):
            continue
        for method in dir(kind):
            one = getattr(kind, method)
            usual = method.startswith("_") or hasattr(tuple, method)
            if callable(one) and not usual:
                found[f"{name}.{method}"] = one
    return found


def arguments(one):
    """Return the arguments of a call that are positional, and those that are keyword-only, without `self`."""
    listed = [each for each in inspect.signature(one).parameters.values() if each.name != "self"]
    named = [each for each in listed if each.kind in (each.KEYWORD_ONLY, each.VAR_KEYWORD)]
    return [each for each in listed if each not in named], named


def written(each):
    star = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
    if each.default is each.empty:
        return f"`{star}{each.name}`"
    default = each.default
    return f"`{each.name}={default.__name__ if inspect.isfunction(default) else repr(default)}`"


def table(title, calls):
    rows = [f"### {title}", "", "| call | by position or name | by name only |", "|---|---|---|"]
    for name, one in calls.items():
        first, named = (", ".join(map(written, some)) for some in arguments(one))
        rows.append(f"| `{name}` | {first} | {named} |")
    return "\n".join([*rows, "", ""])


def page():
    ours = functions(gradclip)
    made = {name: one for name, one in ours.items() if isinstance(one, type)}
    parts = {
        "Functions": {name: one for name, one in ours.items() if name not in made},
        "Classes": made,
        "Methods": methods(),
        **{f"`{name}`": functions(import_module(name)) for name in MODULES},
    }
    return "\n" + "".join(table(title, calls) for title, calls in parts.items())


def current():
    text = PAGE.read_text(encoding="utf-8")
    return text[text.index(MARKS[0]) + len(MARKS[0]) : text.index(MARKS[1])]


if __name__ == "__main__":
    if "--write" in sys.argv:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(
            re.sub(f"({MARKS[0]}).*?({MARKS[1]})", lambda found: found[1] + page() + found[2], text, flags=re.S)
        )
    else:
        print(page())
