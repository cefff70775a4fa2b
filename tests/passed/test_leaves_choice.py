"""The arguments `where` and `integers`: which names are chosen, and what is no choice."""

import random
import time
from fnmatch import fnmatchcase

import pytest

from gradclip._src.passed.leaves import EVERY, Choice, choice_of, matches

NAMES = ("encoder.0.w", "encoder.1.w", "Encoder.w", "head.w", "head.b")


@pytest.mark.parametrize(
    ("where", "left"),
    [
        (None, ()),
        ("*", ()),
        ("encoder.*", (2, 3, 4)),
        ("encoder.?.w", (2, 3, 4)),
        ("encoder.[!0].w", (0, 2, 3, 4)),
        ("head.b", (0, 1, 2, 3)),
        (["head.*", "encoder.0.*"], (1, 2)),
        (("*.b", "*.b"), (0, 1, 2, 3)),
        (lambda name: name.endswith(".b"), (0, 1, 2, 3)),
        (lambda name: len(name) % 2, (3, 4)),
    ],
)
def test_what_is_left(where, left):
    assert Choice(where).left(NAMES) == set(left)


def test_a_name_is_asked_for_once_and_in_order():
    asked = []
    assert Choice(lambda name: not asked.append(name)).left(NAMES) == set()
    assert tuple(asked) == NAMES


@pytest.mark.parametrize(
    ("where", "what"), [("w", "'w' matches"), (["x", "y"], "'x' or 'y' matches"), ((), "an empty list matches")]
)
def test_nothing_chosen_names_all(where, what):
    with pytest.raises(ValueError, match=rf"{what} none of encoder\.0\.w, .*, head\.b\. Correct it"):
        Choice(where).left(NAMES)
    assert Choice(where, alone=False).left(NAMES) == {0, 1, 2, 3, 4}
    with pytest.raises(ValueError, match="none, for there are none"):
        Choice(where).left(())


def test_a_pattern_that_matches_nothing_is_a_mistake():
    with pytest.raises(
        ValueError, match=r"where has 'haed\.\*', which matches none of the names: encoder\.0\.w, .*Correct"
    ):
        Choice(["encoder.*", "haed.*"]).left(NAMES)
    assert Choice(["encoder.*", "haed.*"], alone=False).left(NAMES) == {2, 3, 4}
    assert Choice(["encoder.*", "encoder.0.w"]).left(NAMES) == {2, 3, 4}


def test_a_function_that_chooses_nothing():
    with pytest.raises(ValueError, match=r"the function matches none of .*\. Correct it, or leave where= out"):
        Choice(lambda name: None).left(NAMES)


@pytest.mark.parametrize("where", [3, True, {"head.*"}, {"head.*": 1.0}, ["head.*", 3], [None], b"head.*"])
def test_no_choice(where):
    with pytest.raises(TypeError, match=r"where must be a pattern of names such as 'encoder\.\*'.* got .* of type"):
        Choice(where)


@pytest.mark.parametrize("integers", ["refuse", None, True, 0])
def test_unknown_words_for_integers(integers):
    with pytest.raises(ValueError, match=r"integers must be 'keep'.* or 'raise'.*, got"):
        choice_of(None, integers)


def test_the_usual_arguments_make_one_choice():
    assert choice_of(None, "keep") is EVERY
    assert not EVERY.refuses
    assert choice_of(None, "raise").refuses
    assert choice_of("*", "keep").patterns == ("*",)


def test_what_processes_compare():
    assert EVERY.told == []
    assert Choice("a").told == [("where", "'a'"), ("integers", "keep")]
    assert Choice(["a"]).told == Choice(("a",)).told == Choice(["a"], alone=False).told
    assert Choice(["a"]).told != Choice(["b"]).told
    assert Choice(str).told == Choice(len).told


def test_patterns_without_regular_expressions_match_the_same():
    draw = random.Random(3)
    words = lambda of, most: "".join(draw.choice(of) for _ in range(draw.randrange(most)))
    pairs = [(words("abc.-]!", 5), words("ab.*?[]!-c", 8)) for _ in range(20_000)]
    pairs += [
        (words("abcd", 3), f"[{draw.choice(['', '!'])}{words('abcd-]', 5)}]{words('*?ab', 3)}") for _ in range(20_000)
    ]
    found = [matches(name, pattern) for name, pattern in pairs]
    assert found == [fnmatchcase(name, pattern) for name, pattern in pairs]
    assert 1000 < sum(found) < 30_000


def test_many_stars_take_little_time():
    start = time.process_time()
    assert not matches("a" * 200, "*a" * 50 + "b")
    assert time.process_time() - start < 2.0
