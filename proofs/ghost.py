"""The inequality of ghost norms: what is added to the computed square covers all roundings.

With t = (n + m + T**2 + b + 16) v, all errors of q are at most t / (1 - t) * M**2, and the computed M is at least
M * (1 - t). So e * M**2, computed, must be at least t / (1 - t) * M**2, also after the sums round four times more.
"""

from fractions import Fraction

from claim import Claim, Loosened
from gappa import literal
from script import Script, proven

from gradclip._src.private.ghost import certificate

_MODULE = "gradclip._src.private.ghost.certificate"


def _check() -> str:
    unit = Fraction(certificate._UNIT)
    # What the function returns, in units of t: its own roundings make this differ from size to size by two of them.
    of_one = Fraction(certificate.error_of_square(2**20, 0, 1)) / ((2**20 + 18) * unit) * (1 - 4 * unit)
    factor = Fraction(of_one.numerator * 2**80 // of_one.denominator, 2**80)
    script = Script()
    script.lines.append(f"r = {literal(factor)} * (1 - t) * (1 - t) * (1 - t) * (1 - 4 * {literal(unit)});")
    proven(script, [("t", unit, certificate._LARGEST_ERROR)], "r >= 1")
    return f"1.00001 of {certificate._RAISED} are needed"


def claims() -> list[Claim]:
    """Return what is proven here."""
    raised = f"{_MODULE}._RAISED"
    loosened, enough = (Loosened(raised, 1.000001),), (Loosened(raised, 1.00001),)
    return [Claim("the square of a ghost norm is not too small", _MODULE, "ghost.py", _check, loosened, enough)]
