"""The pages of the gallery hold the code of its scripts and what it prints, and their pictures were drawn by it."""

import difflib
import re
from pathlib import Path

import pytest

import code_blocks
import gallery

PAGES = Path(__file__).parents[1] / "docs" / "gallery"
# Those that compile many programs, or train many times.
SLOW = dict.fromkeys(("learning_rates", "private_epsilon"), pytest.mark.slow)
DRAWN = re.compile(r'<g id="(line2d|FillBetweenPolyCollection|legend)_\d+">')


def words_of(picture):
    """Return what kinds of things a picture shows, in order."""
    return DRAWN.findall(picture.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in gallery.PICTURES])
def test_a_page_shows_what_its_script_prints_and_draws(name, tmp_path):
    picture = tmp_path / "picture.svg"
    printed = gallery.run(name, picture)
    assert gallery.page_file(name).read_text(encoding="utf-8") == gallery.page_of(name, printed)
    assert words_of(picture) == words_of(PAGES / f"{name}.svg") != []


@pytest.mark.parametrize("name", gallery.PICTURES)
def test_a_picture_was_drawn_by_the_script_as_it_is(name):
    assert (PAGES / f"{name}.svg").read_text(encoding="utf-8").endswith(gallery.mark_of(name) + "\n")


def test_every_script_has_its_page_and_its_picture_in_the_overview():
    scripts = {path.stem for path in gallery.SCRIPTS.glob("*.py")}
    overview = (PAGES / "index.md").read_text(encoding="utf-8")
    pictures = dict(re.findall(r"\[!\[[^]]+\]\((\w+)\.svg\)\]\(([\w-]+\.md)\)", overview))
    assert pictures == {name: gallery.page_file(name).name for name in scripts}
    assert scripts == set(gallery.PICTURES)


def test_code_and_what_it_prints_fit_a_page():
    wide = [
        f"{page.name}: {line}"
        for page in PAGES.glob("*.md")
        for block in code_blocks.blocks(page.read_text(encoding="utf-8"))
        for line in block.code.splitlines()
        if len(line) > 80
    ]
    assert wide == []


def test_private_training_differs_in_the_six_lines_that_are_marked():
    blocks = code_blocks.blocks((PAGES / "six-lines.md").read_text(encoding="utf-8"))
    programs = [block for block in blocks if block.kind.startswith("python")][:4]
    for plain, private in (programs[:2], programs[2:]):
        lines = difflib.ndiff(plain.code.splitlines(), private.code.splitlines())
        there = [line[0] for line in lines if line[0] in "+ "]
        marked = [int(number) for number in re.findall(r"\d+", private.kind)]
        assert [number for number, kind in enumerate(there, 1) if kind == "+"] == marked
        assert len(marked) == 6


def test_by_hand_shows_pairs():
    text = (PAGES / "by-hand.md").read_text(encoding="utf-8")
    for section in text.split("\n## ")[1:]:
        by_hand, ours = section.split("```python")[1::2], section.split("```python")[2::2]
        assert section.startswith(section.splitlines()[0] + "\n\nBy hand")
        assert len(by_hand) == len(ours) == 1
    assert text.count("\n## ") == 6
