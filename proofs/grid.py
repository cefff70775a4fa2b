"""Rounding to a grid: each number moves by at most half a step, and its integer fits."""

from fractions import Fraction

from claim import Claim, Loosened
from script import Script, proven

from gradclip._src.private.noise import exact

_MODULE = "gradclip._src.private.noise.exact"


def _check() -> str:
    script = Script()
    script.lines += ["x = float64(x_);", "z = int<ne>(x);"]
    largest = Fraction(exact._LARGEST)
    goal = "z - x in [-1b-1, 1b-1] /\\ z in [-9223372036854775807, 9223372036854775807]"
    proven(script, [("x", -largest, largest)], goal)
    return "half a step, up to 2^62"


def claims() -> list[Claim]:
    """Return what is proven here."""
    return [Claim("numbers on a grid", _MODULE, "grid.py", _check, (Loosened(f"{_MODULE}._LARGEST", 2.0**63),))]
