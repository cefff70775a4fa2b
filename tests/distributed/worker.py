"""What each process of the tests does: join the others, run every case, and print how each went."""

import gc
import inspect
import json
import os
import runpy
import sys
import traceback
import warnings
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from processes import HELPERS, HERE


@contextmanager
def joined():
    """Join the other processes, and leave them at the end."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['STORE']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=60),
    )
    yield
    dist.destroy_process_group()


def run_all(names):
    """Run the cases of a script one after the other: its functions that take nothing, helpers apart."""
    own = {name: one for name, one in names.items() if getattr(one, "__module__", "") == "__main__"}
    run({name: one for name, one in own.items() if not inspect.signature(one).parameters and name not in HELPERS})


def run_named(names):
    """Run cases one after the other, each named behind its script."""
    scripts = dict.fromkeys(name.partition(":")[0] for name in names)
    found = {script: runpy.run_path(str(HERE / script), run_name=script) for script in scripts}
    run({name: found[script][case] for name in names for script, _, case in [name.partition(":")]})


def run(cases):
    """Run cases and print how each went.

    After one that fails the others would wait in vain, so that ends all. A guard that one leaves would see the next.
    """
    gc.freeze()  # so that collecting is cheap
    with joined():
        for name, case in cases.items():
            gc.collect()
            problem = None
            try:
                case()
            except Exception:
                problem = traceback.format_exc()
            print(json.dumps({"name": name, "problem": problem}), flush=True)
            if problem:
                sys.stdout.flush()
                os._exit(1)
