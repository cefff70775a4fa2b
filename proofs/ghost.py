"""The inequality of ghost norms: what is added to the computed square covers all roundings.

With t = (n + m + T**2 + b + 16) v, all errors of q are at most t / (1 - t) * M**2, and the computed M is at least
M * (1 - t). So e * M**2, computed, must be at least t / (1 - t) * M**2, also after the sums round four times more.
"""

import itertools
from fractions import Fraction

from claim import Claim, Loosened, Refuted
from gappa import literal
from script import Script, proven

from gradclip._src.private.ghost import certificate

_MODULE = "gradclip._src.private.ghost.certificate"


_SIZES = (1, 2, 3, 7, 64, 1000, 2**20)


def _check_stated() -> str:
    """Check that what is stated has every term of the proof: 1.1 (n + m + T**2 + b + 16) v, and (T 2**-20)**2."""
    raised, cases = Fraction(certificate._RAISED), 0
    for rows, columns, terms, blocks in itertools.product(_SIZES, repeat=4):
        exact = raised * (rows + columns + terms**2 + blocks + 16) / 2**53
        stated = certificate.error_of_square(rows, columns, terms, blocks)
        if stated is None and exact > certificate._LARGEST_ERROR * (1 - 2.0**-40):
            continue
        if stated is None or abs(Fraction(stated) / exact - 1) > Fraction(1, 2**50):
            raise Refuted(f"{stated} is stated for {(rows, columns, terms, blocks)}, not {float(exact)}")
        floor = Fraction(certificate.raised_by_floor(terms))
        if floor != (Fraction(terms, 2**20) ** 2 if terms > 1 else 0):
            raise Refuted(f"the floor of {terms} terms is {float(floor)}")
        cases += 1
    return f"{cases} sizes"


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
    smaller = (Loosened(f"{_MODULE}._UNIT", 2.0**-54),)
    return [
        Claim("the square of a ghost norm is not too small", _MODULE, "ghost.py", _check, loosened, enough),
        Claim("the error of a ghost norm has all its terms", _MODULE, "ghost.py", _check_stated, smaller),
    ]
