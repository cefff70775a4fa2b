"""The demo: train at several learning rates with each kind of clipping; write a picture, numbers and a report.

A recurrent network learns to read handwritten digits: without clipping, with a fixed and with an adaptive threshold.
All share the seeds, the data, the network and the optimizer. Only the clipping differs. `make demo` runs it.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
from rich.console import Console
from rich.progress import Progress

import demo_training as training
from demo_picture import write_picture
from demo_results import KINDS, WORKS, Clipping, Sweep, Trained
from demo_training import Curves
from gradclip import Monitor

_THREADS = 2
_LIBRARIES = ("gradclip", "numpy", "jax", "jaxlib", "optax", "scikit-learn")


@dataclass(frozen=True)
class DemoSettings:
    """What to train. A value that cannot work raises ValueError."""

    steps: int = 1500
    seeds: int = 3
    rates: Sequence[float] = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
    max_norm: float = 0.5
    out: Path = Path("gradclip-demo")

    def __post_init__(self) -> None:
        for name in ("steps", "seeds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        rising = all(low < high for low, high in zip((0.0, *self.rates), (*self.rates, math.inf), strict=True))
        if not (self.rates and rising):
            raise ValueError(f"rates must be positive, finite and rising, got {self.rates}.")
        # This form also rejects NaN.
        if not self.max_norm >= 0:
            raise ValueError(f"max_norm must not be negative or NaN, got {self.max_norm}. Pass inf for no threshold.")


def settings_from(arguments: list[str] | None = None) -> DemoSettings:
    """Read the command line. A wrong option ends the program with code 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("--steps", type=int, help="training steps in each run")
    parser.add_argument("--seeds", type=int, help="runs with each learning rate, with seeds 0, 1, ...")
    parser.add_argument("--rates", type=float, nargs="+", help="learning rates at the first step, rising")
    parser.add_argument("--max-norm", type=float, help="the fixed threshold")
    parser.add_argument("--out", type=Path, help="folder for the picture and the numbers")
    try:
        settings = DemoSettings(**vars(parser.parse_args(arguments)))
        # Write to the folder before the training, so a failure shows at once.
        settings.out.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=settings.out).close()
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return settings


def run_demo(settings: DemoSettings) -> None:
    """Train, print the results and write them to the folder."""
    console = Console()
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
    monitor.record(curves.norms[0], curves.max_norms[0], layer_norms=layers, loss=curves.losses[0])
    return monitor.report(path, f"Reading digits pixel by pixel, learning rate {rate:g}, adaptive threshold, seed 0")


def _write_results(sweep: Sweep, settings: DemoSettings, seconds: tuple[float, float], path: Path) -> Path:
    threshold = settings.max_norm if math.isfinite(settings.max_norm) else str(settings.max_norm)
    document = {
        "summary": sweep.summary(),
        "settings": asdict(settings) | {"max_norm": threshold, "out": str(settings.out)},
        "network": {"hidden": training.HIDDEN, "batch": training.BATCH},
        "optimizer": {"name": "sgd", "momentum": training.MOMENTUM, "schedule": "cosine"},
        "training_seconds": seconds[0],
        "processor_seconds": seconds[1],
        "versions": {name: version(name) for name in _LIBRARIES},
        "works_from": WORKS,
        "working_rates": {kind: sweep.working(kind) for kind in KINDS},
        "shown_rate": sweep.shown,
        "runs": [{"median": one.median, **asdict(one)} for one in sweep.trained],
    }
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    run_demo(settings_from())
