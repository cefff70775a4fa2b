"""The tables of private_steps.py: time and memory of private steps, and how they grow with the batch and the width."""

from functools import partial

from private_networks import CONTENDERS, OURS, PLAIN, WORKLOADS
from report import head, rounded

OUR_NAME = next(iter(OURS))


def of_networks(framework, rows):
    """Return a line for each network, with time and memory of each contender as multiples of the plain step's."""
    others = CONTENDERS[framework][1:]
    lines = head("", "not private, ms", "MiB", *(name.removeprefix("gradclip, ") for name in others))
    for network, workload in WORKLOADS.items():
        found = {row["name"]: row for row in rows if _place(row) == (framework, network, 1)}
        if found:
            plain = found[PLAIN]
            lines += f"| {workload.title}, {workload.batch} examples | {rounded(plain['processor ms'], 3)} "
            lines += (
                f"| {plain['bytes'] / 2**20:,.1f} | {' | '.join(_times(found[name], plain) for name in others)} |\n"
            )
    return lines


def of_private_times(rows):
    """Return a line for each network, with the time of gradclip's private step, and how much longer others take."""
    peers = {framework: names[-2:] if framework == "PyTorch" else names[-1:] for framework, names in CONTENDERS.items()}
    columns = [(framework, name) for framework, names in peers.items() for name in (OUR_NAME, *names)]
    titles = [f"{framework}, gradclip, ms" if name == OUR_NAME else f"{name}, times" for framework, name in columns]
    lines = head("one private step, padded", *titles)
    for network, workload in WORKLOADS.items():
        cells = []
        for framework, name in columns:
            found = {row["name"]: row.get("processor ms") for row in rows if _place(row) == (framework, network, 1)}
            if name == OUR_NAME:
                cells.append(rounded(found[name], 3))
            else:
                cells.append(rounded(found[name] / found[OUR_NAME], 2) if found[name] else "not supported")
        lines += f"| {workload.title}, {workload.batch} examples | {' | '.join(cells)} |\n"
    return lines


def of_two_cores(rows):
    """Return a line for each network, with the time of the plain step on two cores, and the ratio of gradclip's."""
    lines = head(
        "on two cores", *(f"{framework}, {what}" for framework in CONTENDERS for what in ("not private, ms", OUR_NAME))
    )
    for network, workload in WORKLOADS.items():
        cells = []
        for framework in CONTENDERS:
            found = {row["name"]: row.get("wall ms") for row in rows if _place(row) == (framework, network, 2)}
            if found:
                cells += [rounded(found[PLAIN], 3), rounded(found[OUR_NAME] / found[PLAIN], 2)]
        lines += f"| {workload.title} | {' | '.join(cells)} |\n" if cells else ""
    return lines


def of_growth(rows):
    """Return a line for each framework, contender and direction, with milliseconds and MiB."""
    numbers = {along: sorted({row["number"] for row in rows if row["along"] == along}) for along in ("batch", "width")}
    columns = [(along, number) for along, some in numbers.items() for number in some]
    lines = head("perceptron, ms / MiB", *(f"{along} {number:,}" for along, number in columns))
    for framework, names in CONTENDERS.items():
        for name in names:
            found = {
                (row["along"], row["number"]): row
                for row in rows
                if (row["framework"], row["name"]) == (framework, name)
            }
            if found:
                cells = [_growth_of(found[column]) if column in found else "" for column in columns]
                lines += f"| {framework}, {name} | {' | '.join(cells)} |\n"
    return lines


def _place(row):
    return row["framework"], row["network"], row["threads"]


def _times(row, plain):
    if "reason" in row:
        return (
            "too large" if row["reason"].startswith("MemoryError") or "allocate" in row["reason"] else "not supported"
        )
    time, size = row["processor ms"] / plain["processor ms"], row["bytes"] / plain["bytes"]
    return f"{rounded(time, 2)} / {rounded(size, 2)}"


def _growth_of(row):
    return f"{rounded(row['processor ms'], 3)} / {rounded(row['bytes'] / 2**20, 3)}"


OF_JAX, OF_TORCH = (partial(of_networks, framework) for framework in CONTENDERS)


def of_noise(rows):
    """Return a line for each number of elements: seconds of processor time."""
    names = list(dict.fromkeys(row["name"] for row in rows if "two" not in row["name"]))
    lines = head("elements, seconds of one processor", *names)
    for elements in dict.fromkeys(row["elements"] for row in rows):
        own = {row["name"]: rounded(row["processor seconds"], 2) for row in rows if row["elements"] == elements}
        lines += f"| {elements:,} | {' | '.join(own.get(name, '') for name in names)} |\n"
    return lines
