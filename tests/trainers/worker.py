"""What each process of a test does: join the others, run functions, write what they found as JSON, and end.

`python SOME_worker.py FOLDER RANK RANKS NAME...` runs the functions with these names.
"""

import json
import os
import sys
from pathlib import Path

import torch.distributed

FOLDER, RANK, RANKS, *NAMES = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
os.environ |= {"RANK": str(RANK), "LOCAL_RANK": str(RANK), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}


def run(functions, join=torch.distributed.init_process_group):
    """Run the functions that were asked for, of a table by name, and end the process."""
    # A file, unlike a port, cannot be taken by another process.
    join("gloo", init_method=f"file://{FOLDER}/store", rank=RANK, world_size=RANKS)
    found = {name: functions[name]() for name in NAMES}
    (FOLDER / f"{RANK}.json").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.barrier()
    sys.stdout.flush()
    # A group lives as long as a module that is wrapped in it, though it is destroyed. Its threads still run while the
    # interpreter ends, and one that needs the interpreter then aborts the process.
    os._exit(0)
