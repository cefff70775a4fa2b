"""Start a worker in one or several processes, of which each writes a file of JSON."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def ended(started, seconds=800):
    """Wait until all processes have ended, or one has failed, for which the others would wait. Return their codes."""
    until = time.monotonic() + seconds
    while None in (codes := [process.poll() for process in started]) and not any(codes) and time.monotonic() < until:
        time.sleep(0.05)
    return codes


def run(worker, folder, ranks, names):
    """Run functions of a worker in several processes, and return what each process found."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",
    }
    started = []
    for rank in range(ranks):
        command = [sys.executable, str(worker), str(folder), str(rank), str(ranks), *names]
        with (folder / f"{rank}.log").open("w") as log:
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = ended(started)
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert codes == [0] * ranks, "\n".join((folder / f"{rank}.log").read_text()[-3000:] for rank in range(ranks))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
