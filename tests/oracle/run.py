"""Freeze what thousands of random calls give, to the last bit, and compare with what was frozen.

python tests/oracle/run.py --write | --check | --show [--only PARTS OF NAMES] [--host] [--against OTHER_SRC]

A name tells the function, framework, dtype, order, policy, kind of threshold, kind of values and number of a case:
--only /clip_by_layer_norm/ selects a function, --only /torch/ a framework. `--against` makes the calls that differ
again with another copy of the source, and prints both outcomes. Compiled calls and those of torch-device depend on
the processor: elsewhere compare them with a copy of the old source.
"""

import argparse
import difflib
import json
import os
import subprocess
import sys
import time
from itertools import groupby, islice
from pathlib import Path

HERE = Path(__file__).resolve().parent
WITH_SOURCE = HERE.parents[1] / "scripts" / "with_source.py"
HASHES = HERE / "hashes"
MOST_SHOWN = 20
MOST_LINES = 15


def prepare():
    """Let the modules beside this one be found, and frameworks be quiet and alike everywhere."""
    sys.path.append(str(HERE.parent))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("GRADCLIP_REQUIRE_NATIVE", "1")


def selected(patterns, frameworks=None):
    """Yield the cases whose names, after a slash, hold one of the patterns, and their calls."""
    from oracle.cases import cases

    for case, call in cases():
        if any(one in f"/{case.name}" for one in patterns) and (frameworks is None or case.framework in frameworks):
            yield case, call


def frozen():
    """Return the frozen fingerprints by function, framework and number."""
    return {path.stem.replace("-", " "): json.loads(path.read_text()) for path in sorted(HASHES.glob("*.json"))}


def write(patterns):
    """Freeze the outcomes of the selected cases, in one file for each function. Return how many."""
    from oracle.outcome import fingerprint

    HASHES.mkdir(exist_ok=True)
    every, count = frozen(), 0
    for function, group in groupby(selected(patterns), lambda pair: pair[0].function):
        found = every.get(function, {})
        for case, call in group:
            own = found.setdefault(case.framework, [])
            own += [None] * (case.index + 1 - len(own))
            own[case.index] = fingerprint(case.outcome(call))
            count += 1
        (HASHES / f"{function.replace(' ', '-')}.json").write_text(json.dumps(found, indent=0) + "\n")
        print(f"{function}: {sum(map(len, found.values()))} outcomes", flush=True)
    return count


def differing(patterns, frameworks=None):
    """Return how many cases were tried, and the names of those that do not give what was frozen."""
    from oracle.outcome import fingerprint

    known, count, names = frozen(), 0, []
    for case, call in selected(patterns, frameworks):
        count += 1
        own = known.get(case.function, {}).get(case.framework, [])[case.index :][:1]
        if own != [fingerprint(case.outcome(call))]:
            names.append(case.name)
            print(f"DIFFERS: {case.name}", flush=True)
    return count, names


def outcomes(names):
    """Return the readable outcomes of cases by name."""
    from oracle.cases import cases
    from oracle.outcome import shown

    wanted = set(names)
    return {
        case.name: {part: shown(one) for part, one in case.outcome(call).items()}
        for case, call in cases()
        if case.name in wanted
    }


def outcomes_of(source, names):
    """Return the readable outcomes that another copy of the source gives."""
    script = [sys.executable, str(WITH_SOURCE), str(source), str(HERE / "run.py"), "--as-json"]
    found = subprocess.run(script, input=json.dumps(names), capture_output=True, text=True, check=True)
    return json.loads(found.stdout.splitlines()[-1])


def report(names, against):
    """Print how to repeat what differs; with another copy of the source, print what both give."""
    mine = outcomes(names[:MOST_SHOWN]) if against else {}
    others = outcomes_of(against, names[:MOST_SHOWN]) if against else {}
    for name in mine:
        print(name)
        for part in mine[name]:
            lines = difflib.unified_diff(others[name][part], mine[name][part], "there", "here", part, part, 0, "")
            for line in islice(lines, MOST_LINES):
                print(f"  {line}")
    if names:
        print(f"\nOne alone: python {HERE / 'run.py'} --check --against OTHER_SRC --only '{names[0]}'")


def options():
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--write", action="store_true", help="freeze the outcomes")
    found.add_argument("--check", action="store_true", help="compare with what is frozen")
    found.add_argument("--show", action="store_true", help="print the outcomes")
    found.add_argument("--only", nargs="+", default=[""], help="only cases whose names hold one of these")
    found.add_argument("--host", action="store_true", help="only calls that are neither compiled nor as on a device")
    found.add_argument("--against", help="the src folder of another copy, to print what that gives where calls differ")
    found.add_argument("--as-json", action="store_true", help=argparse.SUPPRESS)
    return found.parse_args()


def main():
    asked = options()
    prepare()
    from oracle.engines import ENGINES

    if asked.as_json:
        print(json.dumps(outcomes(json.loads(sys.stdin.read()))))
        return 0
    start = time.perf_counter()
    frameworks = [name for name, one in ENGINES.items() if one.any_machine] if asked.host else None
    if asked.show:
        for name, parts in outcomes([case.name for case, _ in selected(asked.only, frameworks)]).items():
            print(name, *(line for part in parts.values() for line in part), sep="\n  ")
        return 0
    if asked.write:
        print(f"{write(asked.only)} outcomes are frozen")
        return 0
    count, names = differing(asked.only, frameworks)
    report(names, asked.against)
    print(f"{count} cases, {len(names)} differ, {time.perf_counter() - start:.0f} s")
    return int(bool(names))


if __name__ == "__main__":
    sys.exit(main())
