"""Pieces of the page: sections, tables, and numbers as people read them."""

import math
from collections.abc import Iterable, Sequence
from html import escape

from gradclip._src.words import printable


def section(heading: str, inside: str) -> str:
    """Return a section of the page."""
    return f"<section><h2>{escape(heading)}</h2>{inside}</section>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[int] = (0,)) -> str:
    """Return a table of text, which is escaped. Columns are of numbers, except those of these places."""

    def row(cells: Sequence[str], kind: str) -> str:
        told = (
            f"<{kind} class={'words' if place in words else 'number'}>{escape(printable(cell))}</{kind}>"
            for place, cell in enumerate(cells)
        )
        return f"<tr>{''.join(told)}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f"<div class='scroll'><table><thead>{row(head, 'th')}</thead><tbody>{body}</tbody></table></div>"


def number(value: float) -> str:
    """Return a number with four digits; from 1,000 to a million with thousands separated."""
    if math.isnan(value):
        return "NaN"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.4g}"


def times(value: float, unit: float) -> str:
    """Return how many times the unit a value is, such as "446 x"; empty if that is no finite number above 0."""
    if not (0 < unit < math.inf and 0 < value < math.inf):
        return ""
    factor = value / unit
    if not 0 < factor < math.inf:
        return ""
    return f"{factor:,.0f} x" if 100 <= factor < 1e9 else f"{factor:.3g} x"


def percent(share: float) -> str:
    """Return a share with one digit after the point; below 0.05% with two digits that count."""
    return f"{share:.1%}" if share >= 5e-4 or not share > 0 else f"{100 * share:.2g}%"


def cut(text: str, most: int) -> str:
    """Return text that can be shown; if it is too long, only its beginning."""
    shown = printable(text[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"
