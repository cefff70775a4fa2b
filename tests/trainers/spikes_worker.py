"""Trainers in several processes, for test_spikes_of_processes.py: each writes a file of JSON."""

import os

import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import worker
from gradclip.integrations._torch_steps import StepNotes
from test_spikes import Module, Seen, X, Y, contexts, every, fitted, trained
from worker import FOLDER, RANKS

os.environ["MASTER_ADDR"] = "127.0.0.1"


class Written(Logger):
    name, version = "written", 0

    def __init__(self):
        super().__init__()
        self.rows = []

    @rank_zero_only
    def log_metrics(self, metrics, step=None):
        self.rows.append(metrics)

    def log_hyperparams(self, *args, **kwargs):
        pass


def pairs(seen):
    return [a + b for a, b in zip(seen[::2], seen[1::2], strict=True)]


def recorded(monitor):
    return {
        "norms": [step.norm for step in monitor.records],
        "losses": [step.loss for step in monitor.records],
        "contexts": [*contexts(monitor).values()],
    }


def in_lightning():
    monitor, logger = every(), Written()
    settings = {"strategy": "ddp", "devices": RANKS, "accumulate_grad_batches": 2, "log_every_n_steps": 1}
    module, _ = fitted(monitor, logger=logger, **settings)
    rows = [[row[name] for name in ("grad_norm", "grad_norm_clipped")] for row in logger.rows if "grad_norm" in row]
    means = [(a + b) / 2 for a, b in zip(module.losses[::2], module.losses[1::2], strict=True)]
    return recorded(monitor) | {"seen": pairs(module.seen), "own": means, "logged": rows}


def of_two_optimizers():
    monitors, module = [every(), every()], Module(manual=True)
    fitted(monitors, module=module, max_epochs=1, strategy="ddp", devices=RANKS)
    return [recorded(one) | {"own": module.losses[n::2], "seen": module.seen} for n, one in enumerate(monitors)]


def of_shards():
    """Return the losses of steps of a sharded module, each of two backward passes, in manual optimization."""
    net = Module().net
    fully_shard(net, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    notes, found = StepNotes(None, None, optimizer), []
    for loss in (1.0, 2.0, 4.0, 8.0):
        notes.before_backward()
        net(X[:4], Y[:4])["loss"].backward()
        notes.after_backward(torch.tensor(loss), None)
        if loss in (2.0, 8.0):
            found.append(float(notes.take()[0]))
            optimizer.step()
            optimizer.zero_grad()
    return found


def in_the_trainer():
    monitor, seen = every(), Seen()
    runner = trained(FOLDER, monitor, seen, max_steps=6, gradient_accumulation_steps=2, save_strategy="no")
    rows = [row for row in runner.state.log_history if "loss" in row]
    logged = [[row["grad_norm"], row["grad_norm_clipped"]] for row in rows]
    return recorded(monitor) | {"seen": seen.steps, "logged": logged, "means": [row["loss"] for row in rows]}


if __name__ == "__main__":
    worker.run(globals())
