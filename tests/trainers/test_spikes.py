"""Spikes in trainers: which layers, which step of the trainer, which loss, and which examples of the data set."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import gradclip
from gradclip.integrations import lightning, transformers
from gradclip.integrations._torch_steps import StepNotes

COUNT, BAD = 32, 21
X = torch.randn(COUNT, 3, generator=torch.Generator().manual_seed(0)) * 0.1
Y = torch.where(torch.arange(COUNT) == BAD, 1000.0, X.sum(1))


def joined(lists):
    return [one for each in lists for one in each]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Linear(3, 4)
        self.head = torch.nn.Linear(4, 1)

    def forward(self, x, y, number=None):
        return {"loss": ((self.head(self.body(x).tanh()).squeeze(-1) - y) ** 2).mean()}


class Seen(TrainerCallback):
    """Which examples each step of the Trainer really got, by their values."""

    def __init__(self):
        self.steps = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.steps.append([])

    def watch(self, net):
        net.register_forward_pre_hook(self.saw, with_kwargs=True)

    def saw(self, net, args, kwargs):
        self.steps[-1] += [int((one == X).all(1).nonzero()) for one in kwargs["x"]]


def trained(tmp_path, monitor, seen=None, *, net=None, resume=None, data=None, kind=Trainer, context=None, **settings):
    settings = {"max_steps": 8, "per_device_train_batch_size": 4, "learning_rate": 1e-6, "save_steps": 4, **settings}
    args = TrainingArguments(
        tmp_path, use_cpu=True, report_to="none", disable_tqdm=True, max_grad_norm=0.0, logging_steps=1, **settings
    )
    net = net or Net()
    data = [{"x": x, "y": y, "number": n} for n, (x, y) in enumerate(zip(X, Y, strict=True))] if data is None else data
    runner = kind(net, args, train_dataset=data)
    transformers.ClipCallback(1.0, monitor=monitor, context=context).add_to(runner)
    if seen is not None:
        runner.add_callback(seen)
        seen.watch(net)
    runner.train(resume_from_checkpoint=resume)
    return runner


def contexts(monitor):
    return {spike.step: spike.context for spike in monitor.spikes}


def every():
    """Return a monitor that takes each step for a spike, so that all contexts are kept."""
    monitor = gradclip.Monitor(keep_spikes=100)
    monitor._history._spikes._level = lambda: 0.0
    return monitor


@pytest.mark.parametrize("settings", [{}, {"dataloader_num_workers": 2}, {"gradient_accumulation_steps": 3}], ids=str)
def test_the_examples_of_each_step(tmp_path, settings):
    monitor, seen = every(), Seen()
    runner = trained(tmp_path, monitor, seen, max_steps=20, **settings)
    assert contexts(monitor) == dict(enumerate(seen.steps, 1))
    assert len({*map(tuple, seen.steps)}) == 20
    assert len({*joined(seen.steps)}) == COUNT
    losses = [step.loss for step in monitor.records]
    assert losses == pytest.approx([log["loss"] for log in runner.state.log_history if "loss" in log], rel=1e-4)
    spike = max(monitor.spikes, key=lambda one: one.norm)
    assert BAD in spike.context
    assert {layer.name for layer in spike.layers} == {"body.weight", "body.bias", "head.weight", "head.bias"}


@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 3}, {"ignore_data_skip": True}], ids=str)
def test_a_resumed_run_goes_on_with_its_steps_and_examples(tmp_path, settings):
    whole, seen = every(), Seen()
    trained(tmp_path, whole, seen, max_steps=9, save_steps=5, **settings)
    rest, resumed = every(), Seen()
    trained(tmp_path, rest, resumed, max_steps=9, resume=str(tmp_path / "checkpoint-5"), **settings)
    assert [step.step for step in rest.records] == [6, 7, 8, 9]
    assert contexts(rest) == dict(enumerate(resumed.steps, 6))
    if "ignore_data_skip" not in settings:
        assert resumed.steps == seen.steps[5:]
        assert [step.loss for step in rest.records] == [step.loss for step in whole.records[5:]]


def test_batches_of_another_size_after_a_resume_are_not_guessed(tmp_path):
    trained(tmp_path, None, save_steps=3, max_steps=3)
    monitor = every()
    trained(tmp_path, monitor, resume=str(tmp_path / "checkpoint-3"), per_device_train_batch_size=8, max_steps=9)
    assert [monitor.spikes[0].step, monitor.spikes[0].context] == [4, None]


def test_layers_of_lora_have_the_names_of_the_model(tmp_path):
    net = get_peft_model(Net(), LoraConfig(r=2, target_modules=["body"], modules_to_save=["head"]))
    monitor = every()
    trained(tmp_path, monitor, net=net)
    names = {name for name, p in net.named_parameters() if p.requires_grad}
    assert {layer.name for layer in monitor.spikes[0].layers} == names
    assert any("lora_A" in name for name in names)


def test_the_ids_that_a_data_set_has(tmp_path):
    monitor, seen = every(), Seen()
    trained(tmp_path, monitor, seen, context=lambda batch: batch["number"].tolist(), gradient_accumulation_steps=2)
    assert {step: joined(told) for step, told in contexts(monitor).items()} == dict(enumerate(seen.steps, 1))
    assert {len(told) for told in contexts(monitor).values()} == {2}


class Stream(IterableDataset):
    def __iter__(self):
        for n, (x, y) in enumerate(zip(X, Y, strict=True)):
            yield {"x": x, "y": y, "number": n}


class Reorders(Trainer):
    def get_batch_samples(self, *args):
        batches, count = super().get_batch_samples(*args)
        return batches[::-1], count


@pytest.mark.parametrize("given", [{"data": Stream()}, {"kind": Reorders, "gradient_accumulation_steps": 2}])
def test_what_is_not_known_is_not_guessed(tmp_path, given):
    monitor = every()
    trained(tmp_path, monitor, **given)
    assert {*contexts(monitor).values()} == {None}
    assert all(step.loss > 0 for step in monitor.records)


def test_a_batch_finds_the_example(tmp_path):
    monitor = gradclip.Monitor()
    runner = trained(tmp_path, monitor, max_steps=16)
    spike = max(monitor.spikes, key=lambda one: one.norm)
    loader = runner.get_train_dataloader()
    batch = loader.collate_fn([loader.dataset[i] for i in spike.context])
    params = dict(runner.model.named_parameters())
    found = gradclip.explain_spike(
        lambda params, batch: torch.func.functional_call(runner.model, params, (), batch)["loss"], params, batch=batch
    )
    assert spike.context[found.examples[0].place] == BAD


def test_a_context_needs_a_monitor():
    for callback in (lightning.ClipCallback, transformers.ClipCallback):
        with pytest.raises(ValueError, match="context is recorded by a monitor"):
            callback(1.0, context=len)
        with pytest.raises(TypeError, match="context must be a function of a batch, got 'id'"):
            callback(1.0, context="id", monitor=gradclip.Monitor())


# Lightning


class Module(pl.LightningModule):
    def __init__(self, *, manual=False):
        super().__init__()
        self.net, self.seen, self.losses = Net(), [], []
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx):
        x, y = batch[:2]
        self.seen.append([int((one == X).all(1).nonzero()) for one in x])
        for optimizer in [None] if self.automatic_optimization else self.optimizers():
            loss = self.net(x, y)["loss"]
            self.losses.append(loss.item())
            if optimizer is None:
                return loss
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return None

    def configure_optimizers(self):
        made = [torch.optim.SGD(p.parameters(), lr=1e-6) for p in (self.net.body, self.net.head)]
        return torch.optim.SGD(self.parameters(), lr=1e-6) if self.automatic_optimization else made


def fitted(monitor, *more, loader=None, module=None, path=None, context=None, **settings):
    module = module or Module()
    settings = {"max_epochs": 2, "logger": False, "enable_checkpointing": False, **settings}
    runner = pl.Trainer(
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[lightning.ClipCallback(1.0, monitor=monitor, context=context), *more],
        **settings,
    )
    loader = DataLoader(TensorDataset(X, Y), 4, shuffle=True) if loader is None else loader
    sampler = loader.batch_sampler
    runner.fit(module, loader, ckpt_path=path)
    assert loader.batch_sampler is sampler
    assert "process_dataloader" not in vars(runner.strategy)
    return module, runner


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("scaled", [False, True])
def test_the_examples_of_each_step_in_lightning(workers, scaled):
    monitor = every()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)] if scaled else []
    loader = DataLoader(TensorDataset(X, Y), 4, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    module, _ = fitted(monitor, loader=loader, plugins=plugins)
    assert contexts(monitor) == dict(enumerate(module.seen, 1))
    assert [step.loss for step in monitor.records] == pytest.approx(module.losses, rel=1e-6)
    assert monitor.spikes[0].layers[0].name in {"net.body.weight", "net.body.bias", "net.head.weight", "net.head.bias"}


def test_a_batch_finds_the_example_in_lightning():
    monitor = every()
    module, runner = fitted(monitor)
    spike = max(monitor.spikes, key=lambda one: one.norm)
    loader = runner.train_dataloader
    batch = loader.collate_fn([loader.dataset[i] for i in spike.context])
    net = module.net

    def loss(params, x, y):
        return torch.func.functional_call(net, params, (x, y))["loss"]

    found = gradclip.explain_spike(loss, dict(net.named_parameters()), batch=batch)
    assert spike.context[found.examples[0].place] == BAD


def test_accumulated_batches_in_lightning():
    monitor = every()
    module, _ = fitted(monitor, accumulate_grad_batches=3)
    parts = [slice(*one) for one in ((0, 3), (3, 6), (6, 8), (8, 11), (11, 14), (14, 16))]
    assert contexts(monitor) == {step: joined(module.seen[part]) for step, part in enumerate(parts, 1)}
    losses = [sum(module.losses[part]) / 3 for part in parts]
    assert [step.loss for step in monitor.records] == pytest.approx(losses, rel=1e-6)


def test_a_resumed_fit_goes_on_with_its_steps(tmp_path):
    _, runner = fitted(every(), max_epochs=1)
    runner.save_checkpoint(tmp_path / "one.ckpt")
    monitor = every()
    module, _ = fitted(monitor, path=tmp_path / "one.ckpt", max_epochs=3)
    assert contexts(monitor) == dict(enumerate(module.seen, 9))
    assert len(module.seen) == 16


def test_several_optimizers_have_the_loss_of_their_own_backward_passes():
    monitors = [every(), every()]
    module, _ = fitted(monitors, module=Module(manual=True), max_epochs=1)
    for number, monitor in enumerate(monitors, 1):
        assert contexts(monitor) == dict(zip(range(number, 17, 2), module.seen, strict=True))
        assert [step.loss for step in monitor.records] == pytest.approx(module.losses[number - 1 :: 2], rel=1e-6)


class Adversaries(Module):
    """The losses of `head`, the critic, are accumulated over two batches; that of `body` reaches `head`, too."""

    def __init__(self, *, toggle=False, to_none=True):
        super().__init__(manual=True)
        self.toggle, self.to_none = toggle, to_none
        self.critic, self.maker = [], []

    def training_step(self, batch, number):
        x, y = batch
        self.seen.append([int((one == X).all(1).nonzero()) for one in x])
        body, head = self.optimizers()
        if number % 2 == 0:
            head.zero_grad(set_to_none=self.to_none)
        parts = [self.net(x.detach(), y)["loss"] * scale for scale in (0.5, 0.25)]
        for part in parts:  # two losses of one batch
            self.manual_backward(part, inputs=[*self.net.head.parameters()])
        self.critic.append(sum(parts).item())
        if number % 2 == 0:
            return
        head.step()
        if self.toggle:
            self.toggle_optimizer(body)
        body.zero_grad(set_to_none=self.to_none)
        loss = -self.net(x, y)["loss"]
        self.manual_backward(loss)
        self.maker.append(loss.item())
        body.step()
        if self.toggle:
            self.untoggle_optimizer(body)


@pytest.mark.parametrize("toggle", [False, True])
def test_adversaries(toggle):
    monitors, module = [every(), every()], Adversaries(toggle=toggle)
    fitted(monitors, module=module, max_epochs=1)
    maker, critic = monitors
    assert [step.loss for step in maker.records] == pytest.approx(module.maker, rel=1e-6)
    pairs = [sum(module.critic[place : place + 2]) for place in range(0, 8, 2)]
    assert [step.loss for step in critic.records] == pytest.approx(pairs, rel=1e-6)
    assert [*contexts(maker).values()] == module.seen[1::2]
    assert [*contexts(critic).values()] == [joined(module.seen[place : place + 2]) for place in range(0, 8, 2)]


def test_gradients_that_others_write_to_have_no_loss():
    """Set to zero in place, or clipped by hand: which losses they are of cannot be seen."""
    monitors = [every(), every()]
    fitted(monitors, module=Adversaries(to_none=False), max_epochs=1)
    known = [[step.loss == step.loss for step in monitor.records] for monitor in monitors]
    assert known == [[True] * 4, [True, False, False, False]]
    assert [context is not None for context in contexts(monitors[1]).values()] == known[1]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_passes_that_make_a_graph_count():
    """Each puts a new tensor in the place of the gradient, whose object is often where the old one was."""
    weights = [torch.nn.Parameter(torch.ones(())) for _ in range(2)]
    notes = StepNotes(None, every(), torch.optim.SGD(weights))
    for number in range(9):
        loss = sum(weight * weight for weight in weights)
        notes.before_backward()
        loss.backward(create_graph=True)
        notes.after_backward(loss.detach(), [number])
        del loss
    assert notes.take() == (18.0, [*range(9)])


class SkipsBad(DataLoader):
    def __iter__(self):
        return (batch for batch in super().__iter__() if batch[1].max() < 100)


def test_a_loader_that_does_more_is_not_followed():
    monitor = every()
    fitted(monitor, loader=SkipsBad(TensorDataset(X, Y), 4))
    assert {*contexts(monitor).values()} == {None}
    told = every()
    loader = SkipsBad(TensorDataset(X, Y, torch.arange(COUNT)), 4)
    module, _ = fitted(told, loader=loader, context=lambda batch: batch[2].tolist())
    assert contexts(told) == {step: [seen] for step, seen in enumerate(module.seen, 1)}


def test_a_loader_that_others_go_through_is_not_followed():
    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, number):
            if number == 3:
                next(iter(trainer.train_dataloader))

    monitor = every()
    module = Module()
    runner = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[lightning.ClipCallback(1.0, monitor=monitor), Looks()],
    )
    runner.fit(module, DataLoader(TensorDataset(X, Y), 4, shuffle=True))
    known = [(step - 1) % 8 < 4 for step in range(1, 17)]
    expected = {step: module.seen[step - 1] if known[step - 1] else None for step in range(1, 17)}
    assert contexts(monitor) == expected
