"""The tables of private_steps.py and noise.py: times of private steps, and of their noise."""

from private_networks import CONTENDERS, NOISED, OURS, PLAIN, WORKLOADS
from report import head, rounded

OUR_NAME = next(iter(OURS))


def of_private_times(rows):
    """Return a line for each network.

    It has the time of gradclip's clipped sum, how much longer others' take, and how many times the plain step
    gradclip's whole step takes.
    """
    peers = {framework: names[-2:] if framework == "PyTorch" else names[-1:] for framework, names in CONTENDERS.items()}
    columns = [(framework, name) for framework, names in peers.items() for name in (OUR_NAME, *names, NOISED)]
    kinds = {OUR_NAME: "{}, gradclip, ms", NOISED: "{}, gradclip with noise, of plain"}
    titles = [kinds.get(name, f"{name}, times").format(framework) for framework, name in columns]
    lines = head("one private step, padded", *titles)
    for network, workload in WORKLOADS.items():
        cells = []
        for framework, name in columns:
            found = {row["name"]: row.get("processor ms") for row in rows if _place(row) == (framework, network, 1)}
            if name == OUR_NAME:
                cells.append(rounded(found[name], 3))
            elif name == NOISED:
                cells.append(rounded(found[name] / found[PLAIN], 2) if name in found else "not measured")
            else:
                cells.append(rounded(found[name] / found[OUR_NAME], 2) if found[name] else "not supported")
        lines += f"| {workload.title}, {workload.batch} examples | {' | '.join(cells)} |\n"
    return lines


def _place(row):
    return row["framework"], row["network"], row["threads"]


def of_noise(rows):
    """Return a line for each number of elements: seconds of processor time."""
    names = list(dict.fromkeys(row["name"] for row in rows if "two" not in row["name"]))
    lines = head("elements, seconds of one processor", *names)
    for elements in dict.fromkeys(row["elements"] for row in rows):
        own = {row["name"]: rounded(row["processor seconds"], 2) for row in rows if row["elements"] == elements}
        lines += f"| {elements:,} | {' | '.join(own.get(name, '') for name in names)} |\n"
    return lines
