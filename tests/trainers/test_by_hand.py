"""The short callback that people write by hand to see spikes: where it is wrong, and `ClipCallback` is right."""

import statistics

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import gradclip
from test_spikes import BAD, Module, Net, X, Y, every, fitted, trained


def total(parameters):
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).item()


class ByHand(pl.Callback):
    def __init__(self):
        self.norms, self.spikes = [], []

    def on_train_batch_start(self, trainer, module, batch, number):
        self.batch = batch

    def on_before_optimizer_step(self, trainer, module, optimizer):
        norm = total(module.parameters())
        if self.norms and norm > 10 * statistics.median(self.norms):
            self.spikes.append((len(self.norms) + 1, self.batch))
        self.norms.append(norm)


class InTheTrainer(TrainerCallback):
    def __init__(self):
        self.norms = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.norms.append(total(model.parameters()))


def in_order():
    return DataLoader(TensorDataset(X, Y), 4)


def norms(monitor):
    return [step.norm for step in monitor.records]


def test_in_plain_steps_it_is_right():
    """So the tests below can fail."""
    hand, monitor = ByHand(), gradclip.Monitor()
    fitted(monitor, hand, loader=in_order())
    assert hand.norms == pytest.approx(norms(monitor), rel=1e-5)
    assert [step for step, _ in hand.spikes] == [spike.step for spike in monitor.spikes] == [6, 14]


def test_it_sees_gradients_that_a_scaler_has_multiplied():
    class Fused(Module):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-6, fused=True)

    hand, monitor, plain = ByHand(), gradclip.Monitor(), gradclip.Monitor()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    half = MixedPrecision("16-mixed", "cpu", scaler)
    fitted(monitor, hand, module=Fused(), loader=in_order(), plugins=[half])
    fitted(plain, module=Fused(), loader=in_order())
    assert norms(monitor) == pytest.approx(norms(plain), rel=0.02)
    assert hand.norms == pytest.approx([4 * norm for norm in norms(monitor)], rel=1e-5)


def test_it_names_the_last_of_accumulated_batches():
    hand, monitor = ByHand(), every()
    fitted(monitor, hand, loader=in_order(), accumulate_grad_batches=4, max_epochs=1)
    (_, (xs, _)), spike = hand.spikes[0], monitor.spikes[-1]
    assert BAD in spike.context
    assert not (xs == X[BAD]).all(1).any()


def test_it_counts_from_one_after_a_resume(tmp_path):
    _, runner = fitted(gradclip.Monitor(), max_epochs=1, loader=in_order())
    runner.save_checkpoint(tmp_path / "one.ckpt")
    hand, monitor = ByHand(), gradclip.Monitor()
    fitted(monitor, hand, path=tmp_path / "one.ckpt", loader=in_order())
    assert ([step for step, _ in hand.spikes], [spike.step for spike in monitor.spikes]) == ([6], [14])


def test_it_mixes_the_gradients_of_two_optimizers():
    class Own(pl.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            own[trainer.optimizers.index(optimizer)].append(total(optimizer.param_groups[0]["params"]))

    own, hand, monitors = [[], []], ByHand(), [gradclip.Monitor(), gradclip.Monitor()]
    fitted(monitors, hand, Own(), module=Module(manual=True), loader=in_order(), max_epochs=1)
    for place, monitor in enumerate(monitors):
        assert norms(monitor) == pytest.approx(own[place], rel=1e-5)
        assert all(mixed > norm * 1.001 for mixed, norm in zip(hand.norms[place::2], own[place], strict=True))


def test_in_the_trainer_it_sees_what_the_trainer_has_clipped(tmp_path):
    hand, monitor = InTheTrainer(), gradclip.Monitor()
    data = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]
    args = TrainingArguments(tmp_path, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no")
    Trainer(Net(), args, train_dataset=data, callbacks=[hand]).train()
    trained(tmp_path, monitor)
    assert max(hand.norms) < 1.001
    assert max(norms(monitor)) > 100
