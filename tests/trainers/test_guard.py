"""The guard in loops that Lightning and accelerate run."""

import warnings

import pytest
import torch
from accelerate import Accelerator
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

import gradclip


def batches():
    torch.manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 1) * 30), batch_size=8)


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def training_step(self, batch, _):
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Guarded(Callback):
    def __init__(self, max_norm):
        self.max_norm = max_norm

    def on_train_start(self, trainer, module):
        self.guard = gradclip.guard(trainer.optimizers[0], self.max_norm, every=4)


@pytest.mark.parametrize(
    ("max_norm", "settings", "kinds"),
    [
        (1.0, {"gradient_clip_val": 1.0}, []),
        (1.0, {"gradient_clip_val": 1.0, "accumulate_grad_batches": 4}, []),
        (1.0, {"gradient_clip_val": 1.0, "precision": "bf16-mixed"}, []),
        (0.5, {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, []),
        (1.0, {}, ["not_clipped"]),
        (5.0, {"gradient_clip_val": 10.0}, ["not_clipped"]),
    ],
)
def test_lightning(max_norm, settings, kinds):
    guarded = Guarded(max_norm)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Trainer(max_epochs=2, accelerator="cpu", callbacks=[guarded], **quiet, **settings).fit(Module(), batches())
    assert [found.kind for found in guarded.guard.reports] == kinds
    assert guarded.guard.looks >= 3


@pytest.mark.parametrize(("only_at_the_end", "kinds"), [(True, []), (False, ["clipped_twice"])])
def test_accelerate(only_at_the_end, kinds):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = torch.nn.Linear(4, 1)
    model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), batches())
    guard = gradclip.guard(optimizer, 1.0, every=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            for x, y in data:
                with accelerator.accumulate(model):
                    accelerator.backward((model(x) - y).square().mean())
                    if accelerator.sync_gradients or not only_at_the_end:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
    guard.remove()
    assert [found.kind for found in guard.reports] == kinds
