"""Draw which room imports which: `python scripts/rooms.py` writes docs/assets/rooms.svg.

A room is a folder or a file of `src/gradclip`. Each stands above all that it imports, as low as it can. A line leads to
each room that it imports, unless a room between them imports that one too. Where the pointer rests on a room, its own
lines stand out.
"""

from functools import cache
from pathlib import Path

import structure

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "assets" / "rooms.svg"
WIDTH, HEIGHT, BOX, GAP = 960, 58, 24, 12
STYLE = """
  text { font: 13px sans-serif; text-anchor: middle; fill: #1a1a1a }
  rect { fill: #eef2f7; stroke: #5b7083; rx: 4px }
  path { fill: none; stroke: #5b7083; stroke-opacity: 0.6 }
  g:hover > path { stroke: #c2410c; stroke-opacity: 1; stroke-width: 2 }
  g:hover > rect { fill: #fed7aa }
"""


def floors(rooms):
    """Return lists of rooms, the lowest first; each room is one floor above the highest that it imports."""

    @cache
    def floor_of(room):
        return 1 + max(map(floor_of, rooms[room]), default=-1)

    found = [[] for _ in range(1 + max(map(floor_of, rooms)))]
    for room in sorted(rooms):
        found[floor_of(room)].append(room)
    return found


def boxes(levels):
    """Return the left edge, top, width and height of each room's box."""
    found = {}
    for number, level in enumerate(reversed(levels)):
        widths = [9 * len(room) + 16 for room in level]
        x = (WIDTH - sum(widths) - GAP * (len(level) - 1)) / 2
        for room, width in zip(level, widths, strict=True):
            found[room] = x, GAP + number * HEIGHT, width, BOX
            x += width + GAP
    return found


def shortest(rooms):
    """Return the imports of each room without those that another of its imports leads to."""
    reached = {room: structure.reached(room, rooms) for room in rooms}
    return {
        room: {other for other in others if not any(other in reached[between] for between in others - {other})}
        for room, others in rooms.items()
    }


def drawn(rooms):
    """Return the picture as text."""
    lines_of = shortest(rooms)
    levels = floors(rooms)
    places, parts = boxes(levels), []
    for room, (x, y, width, height) in places.items():
        lines = []
        for other in sorted(lines_of[room]):
            left, top, across, _ = places[other]
            start, end = x + width / 2, left + across / 2
            middle = (y + height + top) / 2
            lines.append(
                f'<path d="M{start:g},{y + height:g} C{start:g},{middle:g} {end:g},{middle:g} {end:g},{top:g}"/>'
            )
        box = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>'
        name = f'<text x="{x + width / 2:g}" y="{y + height / 2:g}" dy="0.35em">{room}</text>'
        parts.append("".join(["<g>", *lines, box, name, "</g>"]))
    size = f"0 0 {WIDTH} {len(levels) * HEIGHT}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img" aria-label="Rooms and what they import">'
    )
    return "\n".join(
        [
            head,
            f"<style>{STYLE}</style>",
            '<rect width="100%" height="100%" style="fill: #fff; stroke: none"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(drawn(structure.graph_of_rooms(structure.graph())))
