"""The demo: train at several learning rates with each kind of clipping; write a picture, numbers and a report."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
from rich.console import Console
from rich.progress import Progress

from gradclip._src.demo import training
from gradclip._src.demo.picture import write_picture
from gradclip._src.demo.results import KINDS, WORKS, Clipping, Sweep, Trained
from gradclip._src.demo.settings import DemoSettings
from gradclip._src.demo.training import Curves
from gradclip._src.monitor.monitor import Monitor
from gradclip._src.monitor.saved import for_json
from gradclip._src.versions import installed_versions

_DIGITS = 9  # enough to tell float32 numbers apart
_THREADS = 2


def run_demo(settings: DemoSettings) -> None:
    """Train, print the results and write them to the folder."""
    console = Console()
    # Write to the folder before the training, so a failure shows at once.
    settings.out.mkdir(parents=True, exist_ok=True)
    TemporaryFile(dir=settings.out).close()
    started = np.array([time.perf_counter(), time.process_time()])
    curves = _train_all(settings, console)
    seconds, processor_seconds = np.array([time.perf_counter(), time.process_time()]) - started
    sweep = Sweep([_described(*which, of_seeds) for which, of_seeds in curves.items()], settings.max_norm)
    shown = curves["adaptive", sweep.shown]
    written = (
        write_picture(sweep, shown, settings.out / "demo.png"),
        _write_report(shown, sweep.shown, settings.out / "report.html"),
        _write_results(sweep, settings, (seconds, processor_seconds), settings.out / "results.json"),
    )
    console.print(sweep.table())
    console.print(sweep.summary(), style="bold", highlight=False)
    console.print(
        f"\nTraining took {seconds:.0f} s, and {processor_seconds:.0f} s of processor time. Written:", highlight=False
    )
    for path in written:
        console.print(f"  {path}", highlight=False, soft_wrap=True, markup=False)


def _train_all(settings: DemoSettings, console: Console) -> dict[tuple[Clipping, float], Curves]:
    runs = [(kind, rate) for kind in KINDS for rate in settings.rates]
    console.print(
        f"A recurrent network of {training.HIDDEN} units reads 8x8 digits pixel by pixel: "
        f"{len(runs) * settings.seeds} runs of {settings.steps} steps.",
        highlight=False,
    )
    # XLA computes without Python's lock.
    with Progress(console=console) as progress, ThreadPoolExecutor(_THREADS) as threads:
        compiled = threads.map(partial(training.trainer, settings), KINDS)
        trainers = dict(zip(KINDS, progress.track(compiled, len(KINDS), description="compile"), strict=True))
        trained = threads.map(lambda run: trainers[run[0]](run[1]), runs)
        return dict(zip(runs, progress.track(trained, len(runs), description="train"), strict=True))


def _described(clipping: Clipping, rate: float, curves: Curves) -> Trained:
    clipped = np.isfinite(curves.norms) & (curves.norms > curves.max_norms)
    return Trained(
        clipping,
        rate,
        tuple(curves.test_accuracy.tolist()),
        tuple(clipped.mean(1).tolist()),
        tuple((~np.isfinite(curves.losses[:, -1])).tolist()),
    )


def _write_report(curves: Curves, rate: float, path: Path) -> Path:
    """Write the monitor's report of the first seed."""
    monitor = Monitor(capacity=len(curves.norms[0]))
    layers = {name: norms[0] for name, norms in curves.layers._asdict().items()}
    monitor.record(curves.norms[0], curves.max_norms[0], layers, loss=curves.losses[0])
    return monitor.report(path, f"Reading digits pixel by pixel, learning rate {rate:g}, adaptive threshold, seed 0")


def _write_results(sweep: Sweep, settings: DemoSettings, seconds: tuple[float, float], path: Path) -> Path:
    document = {
        "summary": sweep.summary(),
        "settings": asdict(settings) | {"out": str(settings.out)},
        "network": {"hidden": training.HIDDEN, "batch": training.BATCH},
        "optimizer": {"name": "sgd", "momentum": training.MOMENTUM, "schedule": "cosine"},
        "training_seconds": seconds[0],
        "processor_seconds": seconds[1],
        "versions": installed_versions(),
        "works_from": WORKS,
        "working_rates": {kind: sweep.working(kind) for kind in KINDS},
        "shown_rate": sweep.shown,
        "runs": [{"median": one.median, **asdict(one)} for one in sweep.trained],
    }
    path.write_text(json.dumps(for_json(document, _DIGITS), indent=2) + "\n", encoding="utf-8")
    return path
