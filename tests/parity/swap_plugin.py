"""A pytest plugin that puts gradclip's functions in the place of a library's own, then runs the library's tests.

It is told by the environment: GRADCLIP_SWAP is a key of SWAPS, GRADCLIP_SWAP_REPORT the file that the outcome is
written to as JSON, and GRADCLIP_SWAP_STRETCH a factor on every threshold (1 is right, anything else is wrong, so that
tests which really call the replacement fail).
"""

import functools
import gc
import importlib
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

KEYWORD_ONLY = math.inf
# Where the library defines its functions, what has them here, and at which position their threshold is.
SWAPS = {
    "optax": (
        "optax.transforms._clipping",
        {
            "adaptive_grad_clip": 0,
            "clip": 0,
            "clip_by_block_rms": 0,
            "clip_by_global_norm": 0,
            "per_example_global_norm_clip": 1,
            "per_example_layer_norm_clip": 1,
        },
    ),
    "jax_privacy": ("jax_privacy.clipping", {"clip_pytree": 1}),
    "jax_privacy newest": (
        "jax_privacy.clipping",
        {
            "clip_and_round_to_grid": 1,
            "clip_pytree": 1,
            "clipped_fun": KEYWORD_ONLY,
            "clipped_grad": KEYWORD_ONLY,
        },
    ),
    "jax_privacy sums": ("jax_privacy.clipping", {"clipped_fun": KEYWORD_ONLY, "clipped_grad": KEYWORD_ONLY}),
    "brainstate": ("brainstate.nn._utils", {"clip_grad_norm": 1}),
}
THRESHOLDS = {
    "clipping",
    "max_norm",
    "max_delta",
    "threshold",
    "clip_norm",
    "l2_clip_norm",
    "l2_norm_clip",
    "global_l2_norm_clip",
}
OUTCOMES: dict[str, set[str]] = {"passed": set(), "failed": set()}
REPLACED: dict[str, int] = {}
ORIGINALS: list[tuple[Any, Any]] = []
"""Each function of the library, and what is in its place."""


def pytest_configure():
    home, names = SWAPS[os.environ["GRADCLIP_SWAP"]]
    library = home.partition(".")[0]
    importlib.import_module(library)
    original = importlib.import_module(home)
    replacement = importlib.import_module(f"gradclip.integrations.{library}")
    factor = float(os.environ.get("GRADCLIP_SWAP_STRETCH", "1"))
    for name, position in names.items():
        function = getattr(replacement, name)
        if factor != 1.0:
            function = stretched(function, position, factor)
        ORIGINALS.append((getattr(original, name), function))
        REPLACED[name] = replace_everywhere(*ORIGINALS[-1])


def pytest_unconfigure():
    """Leave all as it was, for another run in the same process."""
    for original, replacement in ORIGINALS:
        replace_everywhere(replacement, original)
    for found in (ORIGINALS, REPLACED, *OUTCOMES.values()):
        found.clear()


def replace_everywhere(original, replacement):
    """Rebind each global name of a loaded module that holds `original`, gradclip's own apart; return how many."""
    count = 0
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "gradclip":
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is original:
                setattr(module, name, replacement)
                count += 1
    return count


def stretched(function, position, factor):
    """Return a wrong `function`: its threshold is multiplied by `factor`."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        args = list(args)
        if len(args) > position:
            args[position] = args[position] * factor
        for name in THRESHOLDS:
            if name in kwargs:
                kwargs[name] = kwargs[name] * factor
        return function(*args, **kwargs)

    return call


def pytest_collection_finish():
    """Let garbage collections pass over the library and its tests."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logreport(report):
    if report.failed:
        OUTCOMES["failed"].add(report.nodeid)
    elif report.when == "call" and report.passed:
        OUTCOMES["passed"].add(report.nodeid)


def pytest_sessionfinish():
    passed = OUTCOMES["passed"] - OUTCOMES["failed"]
    outcome = {"replaced": REPLACED, "passed": sorted(passed), "failed": sorted(OUTCOMES["failed"])}
    Path(os.environ["GRADCLIP_SWAP_REPORT"]).write_text(json.dumps(outcome))
