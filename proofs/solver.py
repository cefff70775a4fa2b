"""z3: whether numbers exist that break a claim."""

import subprocess

from claim import Refuted

SECONDS = 20


def impossible(script: str) -> None:
    """Raise `Refuted` with z3's example if it finds numbers for which all assertions of the script hold."""
    text = f"{script}\n(check-sat)\n(get-model)\n"
    try:
        ran = subprocess.run(["z3", f"-T:{SECONDS}", "-in"], input=text, capture_output=True, text=True)
    except FileNotFoundError:
        raise RuntimeError("the proofs need Gappa and z3: apt-get install gappa z3") from None
    answer, _, model = ran.stdout.partition("\n")
    if answer == "sat":
        raise Refuted(f"z3 found numbers that break it:\n{model}")
    if answer != "unsat":
        raise RuntimeError(f"z3 found no answer to this script:\n{text}\n{ran.stdout}")
