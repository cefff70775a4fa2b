"""Small programs that use gradclip, in `tests/typing_programs`, and which of their lines must be errors.

Those of `right_*.py` must be right to type checkers, and have the types that `assert_type` says. In `wrong.py` each
line that ends in `# wrong` must be an error, and no other line.
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "typing_programs"
FILES = sorted(PROGRAMS.glob("*.py"))


def wrong_lines():
    """Return the names of files and the numbers of lines that must be errors."""
    return {
        (path.name, number)
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.endswith("# wrong")
    }


def check(found):
    """Compare with what a type checker said, a dict from files and lines to errors."""
    wrong = wrong_lines()
    assert {place: text for place, text in found.items() if place not in wrong} == {}
    assert sorted(wrong - found.keys()) == []
