"""Gappa: whether it proves a script."""

import subprocess
from fractions import Fraction

ROUNDINGS = """@float64 = float<ieee_64, ne>;
@float32 = float<ieee_32, ne>;
@float16 = float<11, -24, ne>;
@bfloat16 = float<8, -133, ne>;
@float16_cut = float<11, -24, zr>;
@bfloat16_cut = float<8, -133, zr>;
"""
SECONDS = 20


def proves(script: str) -> bool:
    """Say whether Gappa proves a script. Raises RuntimeError if it has a mistake, or takes too long."""
    # At its usual 60 bits Gappa refuses true bounds. What is to be split into ranges is split before.
    command = ["gappa", "-Eprecision=200", "-Eno-auto-dichotomy"]
    try:
        ran = subprocess.run(command, input=ROUNDINGS + script, capture_output=True, text=True, timeout=SECONDS)
    except FileNotFoundError:
        raise RuntimeError("the proofs need Gappa and z3: apt-get install gappa z3") from None
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"Gappa found no answer in {SECONDS} seconds:\n{script}") from None
    said = ran.stdout + ran.stderr
    # A hint that is no equation is an axiom, which may be wrong. `y rnd= x;` with a bare name rounds nothing.
    if "not trivially equal" in said or "renaming" in said or ("not satisfied" not in said and ran.returncode):
        raise RuntimeError(f"Gappa cannot read this script:\n{script}\n{said}")
    return ran.returncode == 0


def literal(value: Fraction | float) -> str:
    """Return a binary fraction as Gappa reads it."""
    exact = Fraction(value)
    places = exact.denominator.bit_length() - 1
    if exact.denominator != 1 << places:
        raise ValueError(f"{exact} is no binary fraction, so a bound by it would be another one")
    zeros = (exact.numerator & -exact.numerator).bit_length() - 1 if exact else 0
    return f"{exact.numerator >> zeros}b{zeros - places}"
