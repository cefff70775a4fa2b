"""Check all claims, and print a table of them: `python proofs/run.py [words]`, only those whose line has the words.

Each module of this folder with a function `claims()` has its own. Two are checked at a time.
"""

import importlib
import multiprocessing
import sys
import time
from pathlib import Path

from claim import Claim, Refuted

SECONDS = 80
_HEAD = ("claim", "script", "margin", "seconds")


def claims() -> list[Claim]:
    """Return the claims of all modules in this folder."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
    modules = [importlib.import_module(name) for name in names if name != Path(__file__).stem]
    return [claim for module in modules if hasattr(module, "claims") for claim in module.claims()]


def checked(number: int) -> tuple[bool, str, float]:
    """Check one of the claims. Return whether it is proven, its margin or what went wrong, and the seconds."""
    start = time.monotonic()
    try:
        proven, text = True, claims()[number].check()
    except (Refuted, RuntimeError) as error:
        proven, text = False, str(error)
    return proven, text, time.monotonic() - start


def main(words: str) -> int:
    """Print the table, and then what is not proven. Return how many claims that are."""
    chosen = [(number, claim) for number, claim in enumerate(claims()) if words in f"{claim.name} {claim.script}"]
    rows, failed = [_HEAD], []
    # Longest first would need their times; the modules begin with theirs.
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        running = [(claim, pool.apply_async(checked, (number,))) for number, claim in chosen]
        for claim, one in running:
            try:
                proven, text, seconds = one.get(SECONDS)
            except multiprocessing.TimeoutError:
                proven, text, seconds = False, f"no answer in {SECONDS} seconds", float(SECONDS)
            rows.append((claim.name, claim.script, text if proven else "NOT PROVEN", f"{seconds:.1f}"))
            failed += [] if proven else [f"{claim.script}, {claim.name}, of {claim.module}:\n{text}"]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print("\n\n".join(["", *failed]) if failed else f"\n{len(chosen)} claims, all proven")
    return len(failed)


if __name__ == "__main__":
    sys.exit(1 if main(" ".join(sys.argv[1:])) else 0)
