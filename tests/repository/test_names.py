"""Names that users pass are the same in the code, in types, in docstrings and on pages.

A text lists names if it has more than half of them. Then it must have all.
"""

import ast
import re
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

import gradclip
from gradclip import AdaptiveThreshold
from gradclip import typing as types
from gradclip._src.core import nonfinite
from gradclip._src.core.norms import Order
from gradclip._src.logs.replay import RULES
from gradclip._src.private.sums import settings
from gradclip._src.thresholds.following import FollowingRule

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src" / "gradclip").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in SOURCES + PAGES}

POLICIES, OF_STEPS, ORDERS = list(nonfinite._POLICIES), list(nonfinite._OF_STEPS), ["inf", "-inf"]
OF_ARGUMENT = {"nonfinite": POLICIES, "rule": list(settings.RULES), "ord": ORDERS, "norm_type": ORDERS}
ADAPTIVE = {name for name, made in vars(gradclip).items() if isinstance(made, type) and issubclass(made, FollowingRule)}
ON_PURPOSE = ["docs/reference/errors.md: nonfinite is never 'ignore'"]

_WORD = r"""(?<!=)["'](-?[a-z_]+)["']"""
_ENTRY = re.compile(r"^ *\|? ?`?(nonfinite|rule|ord|norm_type)(?:: |=` \| )", re.M)
_END = re.compile(r"\n\n|\n *\w+: |\n\| |\n *\)")
_TABLE = re.compile(r"(?:^ *\|.*\n)+", re.M)
_PASSED = re.compile(r"""\b(nonfinite|rule)=(["']\w+["'](?:`?(?:, | or | and )`?["']\w+["'])*)""")


def descriptions(text):
    """Yield each argument with its description: in a signature, a docstring or a row."""
    for found in _ENTRY.finditer(text):
        yield found[1], _END.split(text[found.end() :], maxsplit=1)[0]


def lists(text):
    """Yield each argument with the words that its description has, or the rows of its table."""
    for argument, said in descriptions(text):
        yield argument, re.findall(_WORD, said)
    for table in _TABLE.findall(text):
        words = re.findall(rf"^ *\| `?{_WORD}", table, re.M)
        yield from ((name, words) for name in ("nonfinite", "rule") if set(words) & set(OF_ARGUMENT[name]))


def known(argument, words):
    """Return the names of an argument: of a policy those of steps, or of all, where the text has such words."""
    if argument != "nonfinite" or "skip" not in words:
        return OF_ARGUMENT[argument]
    return [*OF_ARGUMENT[argument], "skip"] if "drop" in words else OF_STEPS


def wrong(place, text):
    """Return what a text says of names that is not so."""
    said, found = list(lists(text)), []
    for argument, words in said:
        names = known(argument, words)
        missing = [name for name in names if name not in words]
        found += [f"{place}: {argument} may be {name!r}" for name in missing if 2 * len(missing) < len(names)]
    passed = [(one[1], re.findall(_WORD, f" {one[2]}")) for one in _PASSED.finditer(text)]
    for argument, words in said + passed:
        found += [f"{place}: {argument} is never {word!r}" for word in words if word not in known(argument, words)]
    every = set(re.findall(r"\b(?:Quanti|Spread|Steady)[a-z]*(?:Rule|Threshold)\b", text)) - ADAPTIVE
    return found + [f"{place}: there is no {name}" for name in sorted(every)]


def wrong_anywhere():
    return [one for place, text in TEXTS.items() for one in wrong(place, text) if one not in ON_PURPOSE]


def test_names_are_known_and_lists_of_them_whole():
    found = wrong_anywhere()
    assert found == [], "\n".join(found)


def test_a_new_policy_is_missed_wherever_policies_are_listed(monkeypatch):
    monkeypatch.setitem(OF_ARGUMENT, "nonfinite", [*POLICIES, "drop_some"])
    inside = ("core/nonfinite", "distributed/partial_norm", "functional/clip", "inplace/norm")
    places = [f"src/gradclip/_src/{one}.py" for one in (*inside, "step/in_backward")]
    places += ["README.md", "docs/keras.md", "docs/reference/policies.md"]
    assert sorted(wrong_anywhere()) == sorted(f"{place}: nonfinite may be 'drop_some'" for place in places)


@pytest.mark.parametrize(
    ("place", "old", "new", "said"),
    [
        ("README.md", '| `"zero"` |', '| `"nil"` |', ["nonfinite may be 'zero'", "nonfinite is never 'nil'"]),
        ("README.md", "\n", "\nPass nonfinite='drop' or 'nil'.\n", ["nonfinite is never 'nil'"]),
        ("README.md", "`QuantileRule`", "`QuantilRule`", ["there is no QuantilRule"]),
        ("docs/keras.md", '`"zero"`, or', "or", ["nonfinite may be 'zero'"]),
        (
            "src/gradclip/_src/inplace/norm.py",
            '"zero" or "drop", as',
            '"zeros" or "drop", as',
            ["nonfinite may be 'zero'", "nonfinite is never 'zeros'"],
        ),
        ("src/gradclip/_src/inplace/norm.py", 'Policy = "propagate"', 'Policy = "nan"', ["nonfinite is never 'nan'"]),
        (
            "src/gradclip/_src/private/sums/clip.py",
            '| "automatic" ',
            '| "auto" ',
            ["rule may be 'automatic'", "rule is never 'auto'"],
        ),
    ],
)
def test_a_name_that_is_changed_in_one_place_is_told(place, old, new, said):
    assert old in TEXTS[place]
    assert wrong(place, TEXTS[place].replace(old, new, 1)) == [f"{place}: {one}" for one in said]


def row(text, start):
    """Return the line of a text that starts so."""
    return next(line for line in text.splitlines() if line.startswith(start))


def literals(alias):
    """Return the names that a type has."""
    if get_origin(alias) is Literal:
        return list(get_args(alias))
    return [name for part in get_args(alias) for name in literals(part)]


TYPES = {name: names for name, alias in vars(types).items() if (names := literals(alias)) and name[0].isupper()}


@pytest.mark.parametrize("name", TYPES)
def test_the_reference_has_the_names_of_each_type(name):
    said = row(TEXTS["docs/reference/index.md"], f"| `{name}` |").partition(" | ")[2]
    words = re.findall(r'`"([^"`]+)"`', said)
    words += [word for one in TYPES if f"`{one}`" in said for word in TYPES[one]]
    assert sorted(words) == sorted(TYPES[name])


def test_types_have_the_names_that_the_code_takes():
    assert (TYPES["Policy"], TYPES["RuleName"], TYPES["Ord"]) == (POLICIES, OF_ARGUMENT["rule"], ORDERS)
    assert [Order.parse(one).p for one in ORDERS] == [float(one) for one in ORDERS]
    with pytest.raises(ValueError, match="1, inf, -inf, 'inf', '-inf' or None"):
        Order.parse("fro")


def of_infinity(text):
    """Return the descriptions of orders that have the largest magnitude, but not the smallest."""
    said = [one for argument, one in descriptions(text) if argument in ("ord", "norm_type")]
    return [one for one in said if re.search(r"(?<!-)\binf\b", one) and "-inf" not in one]


def test_each_description_of_an_order_has_both_infinities():
    assert [found for text in TEXTS.values() for found in of_infinity(text)] == []
    assert of_infinity("Args:\n    ord: p, `inf` or `-inf`.\n    norm_type: p or inf.\n") == ["p or inf.\n"]


def without(names, places):
    """Return which places lack which of the names."""
    return [f"{place} lacks {name}" for place, text in places.items() for name in sorted(names) if name not in text]


def test_every_adaptive_rule_is_wherever_they_are_listed():
    places = {
        "AdaptiveThreshold": AdaptiveThreshold.__doc__.partition("skip_above:")[0],
        "README.md": row(TEXTS["README.md"], "[AdaptiveThreshold](docs/adaptive.md)"),
        "docs/adaptive.md": row(TEXTS["docs/adaptive.md"], "| | `"),
        "docs/reference/index.md": row(TEXTS["docs/reference/index.md"], "| adapt the threshold"),
        "logs/replay.py": [one.__name__ for one in RULES.values()],
    }
    found = without(ADAPTIVE, places)
    assert found == [], "\n".join(found)
    assert without({"NewThreshold"}, places) == [f"{place} lacks NewThreshold" for place in places]


def test_every_rule_of_a_replay_is_wherever_they_are_listed():
    told = re.search(r"A number, ([\w, ]+), with settings", TEXTS["src/gradclip/_src/cli/logs.py"])[1]
    assert re.split(", | or ", told) == list(RULES)
    table = TEXTS["docs/how-to/read-a-training-log.md"].partition("| `--rule` |")[2].partition("\n\n")[0]
    assert without(RULES, {"the table": re.findall(r"`([a-z]+)`", table)}) == []
    assert set(re.findall(r"^\| `([a-z]+)` ", table, re.M)) <= set(RULES)


def compared(text):
    """Return the lines of code that compare a policy with a name, instead of asking for its effect."""
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Compare)]
    return [one.lineno for one in found if re.search(r"nonfinite\)? (==|!=|in|not in) .*'", ast.unparse(one))]


def test_no_policy_is_asked_for_by_its_name():
    assert {
        place: lines
        for place, text in TEXTS.items()
        if place.endswith(".py") and "nonfinite" in text and (lines := compared(text))
    } == {}
    assert compared("x = 1\nif call.nonfinite == 'skip' and x: pass\nnonfinite in ('zero', 'skip')") == [3, 2]
