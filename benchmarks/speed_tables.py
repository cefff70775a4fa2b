"""Make what the page on speed shows first: a few rows of clipping.py's results, as a table and in one paragraph."""

from typing import NamedTuple

from report import head, library, rounded

CASES = ("not clipped", "clipped")
# Workload, kind, the library replaced, and what the page calls them.
CHOSEN = {
    ("GPT-2 small", "torch float32", "torch"): "PyTorch, GPT-2 small",
    ("GPT-2 small", "torch bfloat16", "torch"): "PyTorch, GPT-2 small, bfloat16",
    ("ResNet-50", "torch float32", "torch"): "PyTorch, ResNet-50",
    ("1,000 LoRA tensors", "torch float32", "torch"): "PyTorch, 1,000 LoRA tensors",
    ("GPT-2 small", "NumPy float32", "declearn"): "declearn (NumPy), GPT-2 small",
    ("GPT-2 small", "JAX jitted float32", "optax"): "optax, GPT-2 small",
    ("GPT-2 small", "JAX donated float32", "optax"): "optax, GPT-2 small, donated",
    ("GPT-2 small", "JAX eager float32", "optax"): "optax, GPT-2 small, eager",
}


class Compared(NamedTuple):
    """Two times in milliseconds."""

    ours: float
    theirs: float

    @property
    def ratio(self):
        return self.theirs / self.ours


def chosen(rows):
    """Return {label: {case: Compared}}."""
    times = {(row["workload"], row["kind"], row["case"], row["name"]): row["ms"] for row in rows}
    first = {}
    for (workload, kind, case, name), ms in times.items():
        first.setdefault((workload, kind, case, library(name)), ms)
    return {
        label: {
            case: Compared(first[workload, kind, case, "gradclip"], first[workload, kind, case, peer]) for case in CASES
        }
        for (workload, kind, peer), label in CHOSEN.items()
    }


def of_chosen(rows):
    """Return a line for each label."""
    lines = head("CPU time, ms, not clipped / clipped", "gradclip", "the library", "times as fast")
    for label, cases in chosen(rows).items():
        ours, theirs = (
            " / ".join(rounded(getattr(cases[case], whose), 3) for case in CASES) for whose in Compared._fields
        )
        ratios = " / ".join(rounded(cases[case].ratio, 2) for case in CASES)
        lines += f"| {label} | {ours} | {theirs} | {ratios} |\n"
    return lines


def of_short(rows):
    """Return the paragraph at the top of the page."""
    found = chosen(rows)
    gpt = found["PyTorch, GPT-2 small"]
    (ours, theirs), (ours_clipped, theirs_clipped) = ([rounded(time, 3) for time in gpt[case]] for case in CASES)
    ratios = [compared.ratio for cases in found.values() for compared in cases.values()]
    least, most = rounded(min(ratios), 2), rounded(max(ratios), 2)
    lines = (
        "**In short.** These are times on a CPU. For the gradients of GPT-2 small, PyTorch's function takes",
        f"{theirs} ms if nothing is clipped, and {theirs_clipped} ms if it clips.",
        f"gradclip's takes {ours} and {ours_clipped} ms.",
        f"In the first table, gradclip is {least} to {most} times as fast as the library",
        "that it replaces. Some calls [are slower](#where-gradclip-is-slower).",
    )
    return "".join(f"{line}\n" for line in lines)
