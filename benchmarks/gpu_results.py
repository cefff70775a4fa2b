"""The results of gpu.py: how contenders are called, one row as a line, and the files of all devices."""

import json

from report import RESULTS, rounded

KERNELS, PLAIN, PEER, FLOOR = "gradclip", "gradclip without kernels", "peer", "floor"


def name_of(device):
    """Return the file name for the results of a device; one that pages do not read if it did not answer."""
    return "unknown.json" if device == "unknown" else f"gpu-{'-'.join(device.split())}.json"


def measured(folder=RESULTS):
    """Return what was measured on each device."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("gpu-*.json"))]


def words(row):
    """Return what a row is about."""
    return ", ".join(row[key] for key in ("workload", "dtype", "call", "case") if row.get(key))


def shown(row):
    """Return a row as a line to print."""
    if "error" in row:
        return f"{words(row)}: {row['error']}"
    times = "   ".join(f"{name} {rounded(t['ms'], 3)} ms, {t['host us']:.0f} us" for name, t in row["times"].items())
    errors = "".join(f"   {name}: {error}" for name, error in row.get("errors", {}).items())
    return f"{words(row)}: {times}{errors}"


def together(rows):
    """Return {(workload, dtype, call): {case: row}} of the rows that were measured, workload after workload."""
    found, order = {}, list(dict.fromkeys(row["workload"] for row in rows))
    for row in sorted(rows, key=lambda row: order.index(row["workload"])):
        if "times" in row:
            found.setdefault((row["workload"], row["dtype"], row["call"]), {})[row["case"]] = row
    return found
