"""The page on the architecture names files that exist, and the code is no larger than agreed."""

import re
from pathlib import Path

import rooms
import structure

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
# What `python scripts/structure.py` may print at its end, at most.
MOST = {
    "lines": 54_145,
    "modules": 285,
    "circles of modules": 0,
    "circles of rooms": 0,
    "framework members": 105,
    "names of backends in core": 0,
    "floors": 11,
}


def test_the_files_it_names_exist():
    named = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.(?:py|hpp|md))`", PAGE))
    places = (ROOT, ROOT / "src", ROOT / "src" / "gradclip" / "_src")
    assert len(named) > 20
    assert [name for name in sorted(named) if not any((place / name).exists() for place in places)] == []


def test_each_answer_names_three_files_at_most():
    rows = [line for line in PAGE.splitlines() if line.startswith("| a")]
    assert len(rows) == 12
    assert all(len(re.findall(r"`[a-z_/]+(?:\.py|/)`", row)) <= 3 for row in rows)


def test_the_code_is_no_larger_than_agreed(capsys):
    structure.main(structure.ROOT)
    sizes = r"^([\d,]+) lines in (\d+) modules; (\d+) circles of modules, (\d+) of rooms\n(\d+) framework members: .+\n"
    sizes += r"core uses (\d+) names of backends\n(\d+) floors"
    printed = re.search(sizes, capsys.readouterr().out, re.MULTILINE).groups()
    found = dict(zip(MOST, (int(one.replace(",", "")) for one in printed), strict=True))
    assert {name: number for name, number in found.items() if number > MOST[name]} == {}


def test_the_picture_shows_the_rooms_as_they_are():
    assert rooms.PICTURE.read_text() == rooms.drawn(structure.graph_of_rooms(structure.graph()))


def test_each_room_stands_above_what_it_imports():
    levels = rooms.floors({"a": {"b", "c"}, "b": {"c"}, "c": set(), "d": {"c"}})
    assert levels == [["c"], ["b", "d"], ["a"]]
    places = rooms.boxes(levels)
    assert places["a"][1] < places["b"][1] == places["d"][1] < places["c"][1]
    assert rooms.shortest({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"a": {"b"}, "b": {"c"}, "c": set()}
