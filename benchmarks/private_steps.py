"""Measure private steps: time and memory of the clipped sum of per-example gradients, and of gradclip's with its noise.

Each step stands beside the step that is not private, of the same network and batch, and beside other libraries' steps.
A network is measured in a process of its own, on one core and then on two; contenders take turns. Those of a large
network are called twice, on one core, and the second call is timed. What needs more memory than there is, or is not
supported, has the reason in place of figures.

A tenth of the places of a batch is empty, as in Poisson sampling. Contenders that take a mask get one, and the batch as
a whole; Opacus gets the examples alone. gradclip's settings are those whose sensitivity to adding or removing one
example is finite: `pad_to`, or microbatches.

Memory is the most in use at a time, without the inputs: in JAX the temporary buffers of the compiled program, in
PyTorch the allocator's memory. It leaves out what gradclip's kernels allocate, and in PyTorch the sums, which are in
NumPy's memory. For large networks it is the growth of the process in the first call, which leaves out nothing.
"""

import argparse
import itertools
import json
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from private_networks import CONTENDERS, PERCEPTRON, PLAIN, WORKLOADS, perceptron
from report import PRIVATE_STEPS, write

GROWTH = {"batch": (64, 128, 256, 1024), "width": (256, 512, 1000, 2000)}
GROWING = (PLAIN, "gradclip, auto", "gradclip, materialize", "jax.vmap and optax", "Opacus ghost")
HOLDING = ("gradclip, materialize", "jax.vmap and optax")
"""Contenders that hold the gradient of each example. Their growth ends where these are more than `MOST_HELD` bytes."""
MOST_HELD = 2 * 2**30
FEW_CALLS = {"repeats": 1, "seconds": 0, "few": 1}
PACKAGES = ("jax", "jax_privacy", "optax", "torch", "opacus", "numpy")


def asked(question):
    """Return the rows that a process of its own measures."""
    command = [sys.executable, __file__, "--answer", json.dumps(question)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(ended.stderr)
    return json.loads(ended.stdout.splitlines()[-1])


def steps(framework, network, cores, quick):
    """Return the rows of a network, on one core and on two."""
    workload, found = WORKLOADS[network], []
    calls = FEW_CALLS if quick or workload.large else {"repeats": 12, "seconds": 2, "few": 3}
    for threads in (1,) if quick or workload.large else cores:
        described = {"framework": framework, "network": network, "batch": workload.batch, "threads": threads}
        question = {**described, **calls, "names": CONTENDERS[framework], "large": workload.large}
        here = [{**described, **row} for row in asked(question)]
        show(f"{framework}, {workload.title}, cores: {threads}", here)
        found += here
    return found


def growth(framework):
    """Return the rows of perceptrons for several batches, and of several widths."""
    found = []
    question = {"framework": framework, "network": "perceptron", "threads": 1, "large": False}
    for along, numbers in GROWTH.items():
        for number in numbers:
            sizes = {"batch": WORKLOADS["perceptron"].batch, "width": PERCEPTRON[1], along: number}
            names = [name for name in GROWING if name in CONTENDERS[framework] and fits(name, **sizes)]
            rows = asked({**question, **FEW_CALLS, "repeats": 3, **sizes, "names": names})
            show(f"{framework}, perceptron, {along} {number}", rows)
            found += [{"framework": framework, "along": along, "number": number, **row} for row in rows]
    return found


def fits(name, batch, width):
    parameters = sum((inputs + 1) * outputs for inputs, outputs in itertools.pairwise(perceptron(width)))
    return name not in HOLDING or 4 * batch * parameters <= MOST_HELD


def show(title, rows):
    print(title)
    plain = next(row for row in rows if row["name"] == PLAIN)
    for row in rows:
        if "reason" in row:
            print(f"  {row['name']:<24} {row['reason']}", flush=True)
            continue
        times = "".join(f"{row[key]:10.2f} ms {row[key] / plain[key]:7.2f}" for key in ("wall ms", "processor ms"))
        memory = f"{row['bytes'] / 2**20:10.1f} MiB {row['bytes'] / plain['bytes']:7.2f}"
        print(f"  {row['name']:<24}{times}{memory}", flush=True)


def kept(rows, growths, out):
    """Write rows to the results, in place of those that were measured before."""
    known = json.loads(out.read_text()) if out.exists() else {}
    again = {(row["framework"], row["network"], row["threads"]) for row in rows}
    measured = known.get("rows", [])
    others = [row for row in measured if (row["framework"], row["network"], row["threads"]) not in again]
    order = {name: i for i, name in enumerate(WORKLOADS)}
    everything = sorted(others + rows, key=lambda row: (row["framework"], order[row["network"]], row["threads"]))
    versions = {name: metadata.version(name) for name in PACKAGES}
    machine = {"processor": processor(), "python": platform.python_version(), **versions}
    write({"machine": machine, "rows": everything, "growth": growths or known.get("growth", [])}, out)


def processor():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the first network only, with few calls")
    parser.add_argument("--only", choices=[*WORKLOADS, "growth"], help="one network, or the growth")
    parser.add_argument("--framework", choices=CONTENDERS, help="one framework")
    parser.add_argument("--cores", type=int, choices=(1, 2), help="on one core or on two; both if not given")
    parser.add_argument("--write", action="store_true", help=f"write results/{PRIVATE_STEPS.name}")
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        from private_measured import answer

        answer(json.loads(options.answer))
        return
    frameworks = [options.framework] if options.framework else list(CONTENDERS)
    networks = ["perceptron"] if options.quick else [name for name in WORKLOADS if options.only in (None, name)]
    cores = (options.cores,) if options.cores else (1, 2)
    asked_for = [(framework, name) for framework in frameworks for name in networks]
    rows = [row for pair in asked_for for row in steps(*pair, cores, options.quick)]
    grows = not options.quick and options.only in (None, "growth")
    growths = [row for framework in frameworks for row in growth(framework)] if grows else []
    if options.write:
        kept(rows, growths, PRIVATE_STEPS)


if __name__ == "__main__":
    main()
