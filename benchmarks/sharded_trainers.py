"""Clip sharded gradients with the functions of six trainers: which layouts of benchmarks/sharded.py come out right.

Each trainer's own function is called as its trainer calls it, with the arguments that it has for pipelines and experts.
Needs accelerate, transformers, nemo-automodel, torchtitan and axolotl, the last three without their dependencies:
`pip install --no-deps nemo-automodel==0.7.0 torchtitan==0.3.0 spmd-types tyro docstring-parser typeguard axolotl`.
"""

import argparse
import os
import tempfile
import time
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import torch
from report import SHARDED_TRAINERS, write
from sharded import LAYOUTS, TIMEOUT, UNEVEN, WORLD, Meshes, ours, outcome, spawn, torchs
from torch.distributed.device_mesh import init_device_mesh

STAGES, EXPERTS = "pipeline: other layers on each", "experts split over a pair"


def accelerates(parameters, max_norm, options):
    from accelerate import Accelerator

    return Accelerator(cpu=True).clip_grad_norm_(parameters, max_norm, options.get("ord", 2))


def transformers(parameters, max_norm, options):
    """The trainer passes no order: it clips by the norm of order 2."""
    from accelerate import Accelerator
    from transformers import Trainer

    trainer = object.__new__(Trainer)
    trainer.accelerator, trainer._mixed_mesh_grads = Accelerator(cpu=True), None
    trainer.args = SimpleNamespace(max_grad_norm=max_norm, fp16=False)
    return trainer._clip_grad_norm(SimpleNamespace(parameters=lambda: iter(parameters)))


def automodels(parameters, max_norm, options):
    from nemo_automodel.components.training.utils import clip_grad_norm

    model = torch.nn.ParameterList(parameters)
    known = {"norm_type": options.get("ord", 2)}
    if options["layout"] == STAGES:
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("pp",))
        known |= {"pp_enabled": True, "device_mesh": mesh, "pp_axis_name": "pp"}
    if options["layout"] == EXPERTS:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        known |= {"moe_mesh": mesh, "ep_axis_name": "ep", "ep_param_ids": {id(parameters[0])}}
    return clip_grad_norm(max_norm, [model], **known)


def torchtitans(parameters, max_norm, options):
    from torchtitan.distributed.utils import clip_grad_norm_

    known = {"norm_type": options.get("ord", 2)}
    if options["layout"] == STAGES:
        known["pp_mesh"] = init_device_mesh("cpu", (WORLD,))
    if options["layout"] == EXPERTS:
        known["ep_enabled"] = True
    return clip_grad_norm_(parameters, max_norm, **known)


def axolotls(parameters, max_norm, options):
    from axolotl.monkeypatch.accelerate.parallelism_config import _ep_aware_clip_grad_norm

    return _ep_aware_clip_grad_norm(parameters, max_norm, options.get("ord", 2))


FUNCTIONS = {
    "gradclip": (ours, None, "gradclip"),
    "NeMo Automodel": (automodels, "nemo_automodel.components.training.utils", "nemo-automodel"),
    "accelerate": (accelerates, "accelerate", "accelerate"),
    "transformers": (transformers, "transformers.trainer", "transformers"),
    "torch": (torchs, None, "torch"),
    "torchtitan": (torchtitans, "torchtitan.distributed.utils", "torchtitan"),
    "axolotl, its patch for experts": (axolotls, "axolotl.monkeypatch.accelerate.parallelism_config", "axolotl"),
}


def called(trainer, names, folder):
    """Return the outcome of each layout, up to one that leaves processes waiting for each other.

    A process that ends would wake those that wait for it, so it stays until all are done, or none waits any longer.
    """
    clip, module, _ = FUNCTIONS[trainer]
    if module is not None:
        import_module(module)
    meshes, found = Meshes(), {}
    for name in names:
        parameters, full, options = LAYOUTS[name](meshes)
        call = clip if clip is ours else lambda *given, name=name: clip(*given[:2], given[2] | {"layout": name})
        found[name] = outcome(call, parameters, full, options)
        if found[name] == "hangs":
            break
    (Path(folder) / str(torch.distributed.get_rank())).touch()
    end = time.monotonic() + 1.5 * TIMEOUT
    while len(list(Path(folder).iterdir())) < WORLD and time.monotonic() < end:
        time.sleep(0.1)
    return found


def in_a_word(outcomes):
    """Return what all processes together make of a layout."""
    kinds = [kind.partition(":")[0] for kind in outcomes]
    if "hangs" in kinds:
        return "hangs"
    found = [kind for kind in kinds if kind != "right"]
    return found[0] if found else "right"


def _started(trainer, names):
    """Run the processes, again if they do not find each other in time: the machine may be busy."""
    for _ in range(5):
        try:
            with tempfile.TemporaryDirectory() as folder:
                return spawn(called, WORLD, trainer, names, folder)
        except torch.multiprocessing.ProcessRaisedException as error:
            if "init_process_group" not in str(error):
                raise
    raise TimeoutError("the processes did not find each other; pass a longer time in TIMEOUT, in seconds")


def of(trainer):
    """Return the outcome of each layout in a word."""
    even = [name for name in LAYOUTS if name not in UNEVEN]
    waiting, found = [even, *([name] for name in UNEVEN)], {}
    while waiting:
        names = waiting.pop(0)
        of_ranks = _started(trainer, names)
        known = [name for name in names if all(name in one for one in of_ranks)]
        found |= {name: in_a_word([one[name] for one in of_ranks]) for name in known}
        waited = next((name for name in names if any(one.get(name) == "hangs" for one in of_ranks)), None)
        if waited is not None:
            found[waited] = "hangs"
            rest = names[names.index(waited) + 1 :]
            waiting = [rest, *waiting] if rest else waiting
        print(f"{trainer:32}", {name: found[name] for name in names if name in found}, flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="only functions of trainers whose names hold this")
    parser.add_argument("--out", type=Path, default=SHARDED_TRAINERS, help="the file to write")
    options = parser.parse_args()
    os.environ.setdefault("ACCELERATE_USE_CPU", "1")
    chosen = [name for name in FUNCTIONS if options.only in name]
    found = {}
    for name in chosen:
        found[name] = of(name)
        right = sum(outcome == "right" for outcome in found[name].values())
        print(f"{name}: {right} of {len(LAYOUTS)} right", flush=True)
    if options.only:
        return
    versions = {name: None if name == "gradclip" else version(FUNCTIONS[name][2]) for name in chosen}
    table = [{"layout": layout, **{name: found[name][layout] for name in chosen}} for layout in LAYOUTS]
    write({"versions": versions, "layouts": table}, options.out)


if __name__ == "__main__":
    main()
