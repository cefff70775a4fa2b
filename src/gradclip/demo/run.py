"""The demo: train without clipping, with a fixed and an adaptive threshold; write pictures and numbers."""

import json
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from gradclip.demo import training
from gradclip.demo.picture import write_picture
from gradclip.demo.results import LEARNED_LOSS, RunResult, describe_run, results_table, summarise
from gradclip.demo.settings import DemoSettings
from gradclip.monitor.monitor import Monitor
from gradclip.monitor.saved import for_json
from gradclip.versions import installed_versions

_DIGITS = 9  # enough to tell float32 numbers apart


def run_demo(settings: DemoSettings) -> None:
    """Train without clipping and with two kinds of it; print the results and write them to the folder."""
    console = Console()
    # Create the folder before the training, so a failure shows at once.
    settings.out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    monitor, follower = Monitor(capacity=settings.steps), Monitor(capacity=settings.steps)
    runs = _train_all(settings, console, monitor, follower)
    seconds = time.perf_counter() - started
    summary = summarise(*runs, settings)
    title = f"Reading digits pixel by pixel, learning rate {settings.learning_rate:g}"
    monitor.plot(settings.out / "monitor.png")
    follower.plot(settings.out / "monitor_adaptive.png")
    written = (
        write_picture(runs, title, settings.out / "demo.png"),
        settings.out / "monitor.png",
        settings.out / "monitor_adaptive.png",
        monitor.report(settings.out / "report.html", f"{title}, with gradclip, seed 0"),
        follower.report(settings.out / "report_adaptive.html", f"{title}, adaptive threshold, seed 0"),
        _write_results(runs, settings, summary, seconds, settings.out / "results.json"),
        _write_curves(runs, settings.out / "curves.json"),
    )
    console.print(results_table(runs))
    console.print(summary, style="bold", highlight=False)
    console.print(f"\nTraining took {seconds:.0f} s. Written:", highlight=False)
    for path in written:
        console.print(f"  {path}", highlight=False, soft_wrap=True, markup=False)


def _train_all(
    settings: DemoSettings, console: Console, monitor: Monitor, follower: Monitor
) -> tuple[RunResult, RunResult, RunResult]:
    console.print(
        f"A recurrent network of {training.HIDDEN} units reads 8x8 digits pixel by pixel: "
        f"{settings.seeds} seeds, {settings.steps} steps, three runs.",
        highlight=False,
    )
    columns = (
        TextColumn("{task.description:<16}"),
        BarColumn(),
        TextColumn("{task.completed:>5.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        plain = _train_one("without clipping", "none", settings, progress)
        clipped = _train_one("with gradclip", "fixed", settings, progress, monitor)
        adaptive = _train_one("adaptive", "adaptive", settings, progress, follower)
    return plain, clipped, adaptive


def _train_one(
    name: str,
    clipping: training.Clipping,
    settings: DemoSettings,
    progress: Progress,
    monitor: Monitor | None = None,
) -> RunResult:
    task = progress.add_task(name, total=settings.steps, loss="")

    def on_chunk(steps: int, losses: np.ndarray) -> None:
        progress.update(task, advance=steps, loss=f"loss {np.median(losses[:, -1]):.3g}")

    return describe_run(name, training.train(settings, clipping, on_chunk, monitor))


def _write_results(
    runs: tuple[RunResult, ...], settings: DemoSettings, summary: str, seconds: float, path: Path
) -> Path:
    document = {
        "summary": summary,
        "settings": asdict(settings) | {"out": str(settings.out)},
        "network": {"hidden": training.HIDDEN, "batch": training.BATCH},
        "optimizer": {"name": "sgd", "momentum": training.MOMENTUM, "schedule": "cosine"},
        "learned_below_loss": LEARNED_LOSS,
        "training_seconds": seconds,
        "versions": installed_versions(),
        "runs": [
            {
                "name": run.name,
                "median_test_accuracy": run.median_test_accuracy,
                "seeds": [asdict(seed) for seed in run.seeds],
            }
            for run in runs
        ],
    }
    path.write_text(json.dumps(for_json(document, _DIGITS), indent=2) + "\n", encoding="utf-8")
    return path


def _write_curves(runs: tuple[RunResult, ...], path: Path) -> Path:
    document = {
        run.name: {"loss": run.curves.losses.tolist(), "gradient_norm": run.curves.norms.tolist()} for run in runs
    }
    path.write_text(json.dumps(for_json(document, _DIGITS)) + "\n", encoding="utf-8")
    return path
