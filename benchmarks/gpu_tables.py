"""Make what the page on accelerators shows of the results of gpu.py: two tables for each device."""

from gpu_results import FLOOR, KERNELS, PEER, PLAIN, together, words
from report import head, rounded

GLOBAL = "clip_grad_norm_"
COLUMNS = (
    "gradclip, ms",
    "without kernels, ms",
    "library, ms",
    "floor, ms",
    "times as fast",
    "gradclip, host us",
    "library, host us",
)
TITLES = {"torch": "PyTorch", "triton": "Triton", "opacus": "Opacus", "jax": "JAX", "optax": "optax"}
NONE = "–"


def of_gpu(measured, picture=None):
    """Return the text for all devices. `picture` is a path relative to the page."""
    shown = [f"![Times of gradclip and PyTorch as multiples of a plain read and write]({picture})\n"] if picture else []
    return "\n".join(shown + [_of_device(found) for found in measured])


def _of_device(found):
    versions, rows = found["versions"], together(found["rows"])
    first = {key: cases for key, cases in rows.items() if key[2] == GLOBAL}
    others = {key: cases for key, cases in rows.items() if _is_among_others(key, first)}
    named = ", ".join(f"{title} {versions[name]}" for name, title in TITLES.items() if versions.get(name))
    text = f"**{found['device']}** ({named}). A copy within the device reads and writes "
    text += f"{found['copy GB/s']:,.0f} GB/s.\n\n"
    text += _table("clip_grad_norm_, not clipped / clipped", first, found["cache"], lambda key: ", ".join(key[:2]))
    if others:
        text += '\n<details markdown="1"><summary>Other calls</summary>\n\n'
        text += _table("not clipped / clipped", others, found["cache"], ", ".join) + "\n"
        text += f"{_peers(first | others)}\n</details>\n"
    return text + _missing(found)


def _is_among_others(key, first):
    """Return whether the page shows a row: calls of the first workload, float16 aside, and what no first row times."""
    workload, dtype, call = key
    workloads = list(dict.fromkeys(one[0] for one in first))
    return call != GLOBAL and (workload not in workloads or (workload == workloads[0] and dtype != "float16"))


def _table(title, rows, cache, title_of):
    lines = head(title, *COLUMNS)
    for key, cases in rows.items():
        in_cache = ", in cache" if 0 < next(iter(cases.values()))["bytes"] <= cache else ""
        lines += f"| {title_of(key)}{in_cache} | {' | '.join(_cells(list(cases.values())))} |\n"
    return lines


def _cells(cases):
    for name in (KERNELS, PLAIN, PEER, FLOOR):
        yield _each(cases, lambda row, name=name: _ms(row, name))
    yield _each(cases, _ratio)
    for name in (KERNELS, PEER):
        yield _each(cases, lambda row, name=name: _host(row, name))


def _each(cases, cell):
    """Return a cell for all cases; only one dash if none was measured."""
    cells = [cell(row) for row in cases]
    return NONE if set(cells) == {NONE} else " / ".join(cells)


def _ms(row, name):
    times = row["times"].get(name)
    return rounded(times["ms"], 3) if times else NONE


def _host(row, name):
    times = row["times"].get(name)
    return f"{times['host us']:,.0f}" if times else NONE


def _ratio(row):
    ours, theirs = (row["times"].get(name) for name in (KERNELS, PEER))
    return rounded(theirs["ms"] / ours["ms"], 2) if ours and theirs else NONE


def _peers(rows):
    """Return a list of what each call is compared with."""
    peers = {key[2]: next(iter(cases.values()))["peer"] for key, cases in rows.items()}
    return "".join(f"- {call}: the library is {peer}.\n" for call, peer in peers.items())


def _missing(found):
    """Return a list of what raised an error or took too long."""
    failed = [
        (row, error)
        for row in found["rows"]
        for error in ([row["error"]] if "error" in row else [f"{n}: {e}" for n, e in row.get("errors", {}).items()])
    ]
    lines = "".join(f"- {words(row)}: `{error.replace('`', '')}`\n" for row, error in failed)
    return f"\nNot measured:\n\n{lines}" if lines else ""
