"""Lightning trains, and each step gets clipped gradients."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import gradclip
from gradclip import clip_at_step
from gradclip._src.step.fold import FusedClipping
from gradclip.integrations.lightning import ClipCallback
from recorded import Recorded

C = 1.0
LOGGED = ("grad_norm", "grad_norm_clipped", "clipped_share", "skipped_share")
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.01, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}
EACH_OPTIMIZER = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def data(count=12):
    """Return batches with gradients below and above the threshold."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor(([0.05] * 3 + [6.0, 1.0, 3.0]) * (count // 6))
    xs = torch.randn(count, 4, 3, generator=generator) * scales[:, None, None]
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(xs, xs.sum(-1)), batch_size=None)


class Net(pl.LightningModule):
    def __init__(self, make, scale=None):
        super().__init__()
        torch.manual_seed(1)
        self.body = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
        self.make, self.scale = make, scale or (lambda: 1.0)

    def loss(self, batch):
        x, y = batch
        return ((self.body(x).squeeze(-1) - y) ** 2).float().mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        optimizer = self.make(self.parameters())
        self.recorded = Recorded(optimizer, self.scale)
        return optimizer


def trainer(*callbacks, **settings):
    settings = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, **settings}
    return pl.Trainer(
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **settings,
    )


@EACH_OPTIMIZER
@pytest.mark.parametrize("accumulated", [1, 3])
def test_automatic_optimization(make, accumulated):
    net, monitor = Net(make), gradclip.Monitor()
    callback = ClipCallback(C, monitor=monitor)
    trainer(callback, accumulate_grad_batches=accumulated).fit(net, data())
    net.recorded.check(C, 12 // accumulated)
    assert [step.norm for step in monitor.records] == pytest.approx(net.recorded.raw, rel=1e-5)
    assert callback.clipping[0].steps == 12 // accumulated


SCOPES = {
    "layer": lambda parameters: gradclip.clip_grad_layer_norm_(parameters, 0.1),
    "unit": lambda parameters: gradclip.clip_grad_unit_norm_(parameters, 0.1, unit_axis=1),
    "value": lambda parameters: gradclip.clip_grad_value_(parameters, 0.1),
    "agc": lambda parameters: gradclip.adaptive_grad_clip_(parameters, 0.1, 0.01),
}


@pytest.mark.parametrize("scope", SCOPES)
def test_other_scopes(scope):
    class ByHand(Net):
        def on_before_optimizer_step(self, optimizer):
            SCOPES[scope](self.parameters())

    net, by_hand, plain = (kind(OPTIMIZERS["SGD"]) for kind in (Net, ByHand, Net))
    settings = {"agc": {"eps": 0.01}, "unit": {"unit_axis": 1}}
    fitted = trainer(ClipCallback(0.1, scope=scope, **settings.get(scope, {})))
    fitted.fit(net, data())
    trainer().fit(by_hand, data())
    trainer().fit(plain, data())
    assert all(map(torch.equal, net.parameters(), by_hand.parameters()))
    assert not any(map(torch.equal, net.parameters(), plain.parameters()))
    logged = {"value": set(), "agc": {"grad_norm"}}.get(scope, {*LOGGED, f"clipped_{scope}_share"})
    assert set(fitted.callback_metrics) == logged


def test_only_chosen_parameters_are_clipped():
    class Named(Net):
        def configure_optimizers(self):
            return torch.optim.SGD(self.named_parameters(), lr=0.01)

    net, before = Named(None), Net(None)
    trainer(ClipCallback(0.0, where="*.weight", integers="raise"), max_steps=1).fit(net, data())
    kept = {name for name, p in net.named_parameters() if torch.equal(p, before.get_parameter(name))}
    assert kept == {name for name, _ in net.named_parameters() if name.endswith(".weight")}


def test_without_the_callback_nothing_clips():
    """The check above can fail."""
    net = Net(OPTIMIZERS["SGD"])
    trainer().fit(net, data())
    with pytest.raises(AssertionError):
        net.recorded.check(C, 12)


@EACH_OPTIMIZER
def test_bfloat16(make):
    net = Net(make)
    trainer(ClipCallback(C), precision="bf16-mixed").fit(net, data())
    net.recorded.check(C, 12)


@EACH_OPTIMIZER
def test_a_scaler(make):
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    net = Net(make, scale=scaler.get_scale)
    callback = ClipCallback(C)
    trainer(callback, plugins=[MixedPrecision("16-mixed", "cpu", scaler)]).fit(net, data())
    net.recorded.check(C, 12)


def test_lbfgs():
    """Every gradient that it sees is clipped, each time it calls the closure."""
    norms, monitor = [], gradclip.Monitor()

    class Seen(torch.optim.LBFGS):
        def _gather_flat_grad(self):
            flat = super()._gather_flat_grad()
            norms.append(float(torch.linalg.vector_norm(flat.double())))
            return flat

    class Plain(Net):
        def configure_optimizers(self):
            return Seen(self.parameters(), lr=0.1, max_iter=3)

    trainer(ClipCallback(C, monitor=monitor)).fit(Plain(None), data())
    assert len(norms) == monitor.steps > 12
    assert max(norms) <= C
    assert monitor.num_clipped > 3
    assert norms == pytest.approx([min(step.norm, C) for step in monitor.records], rel=1e-5)


class TwoOptimizers(Net):
    def __init__(self):
        super().__init__(None)
        self.automatic_optimization = False

    def configure_optimizers(self):
        made = [OPTIMIZERS["SGD"](self.body[0].parameters()), OPTIMIZERS["fused AdamW"](self.body[2].parameters())]
        self.recorded = list(map(Recorded, made))
        return made

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            for each in self.optimizers():
                each.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


def test_manual_optimization_with_two_optimizers():
    net, monitors = TwoOptimizers(), [gradclip.Monitor(), gradclip.Monitor()]
    trainer(ClipCallback([0.5, 1.0], monitor=monitors)).fit(net, data())
    for recorded, max_norm, monitor in zip(net.recorded, (0.5, 1.0), monitors, strict=True):
        recorded.check(max_norm, 12)
        assert monitor.steps == 12


def test_without_the_callback_in_configure_optimizers():
    """The line of users who write no callbacks."""

    class Clipped(Net):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            self.clipping = clip_at_step(optimizer, C)
            return optimizer

    net = Clipped(OPTIMIZERS["fused AdamW"])
    trainer().fit(net, data())
    net.recorded.check(C, 12)
    assert isinstance(net.clipping, FusedClipping)


# Clipping twice


def test_the_clipping_of_the_trainer_is_an_error():
    net = Net(OPTIMIZERS["SGD"])
    with pytest.raises(ValueError, match=r"Trainer\(gradient_clip_val=0.5\). Leave gradient_clip_val out"):
        trainer(ClipCallback(C), gradient_clip_val=0.5).fit(net, data())
    assert net.recorded.used == []


def test_the_clipping_of_the_trainer_is_told_of_without_the_callback():
    class Clipped(Net):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            clip_at_step(optimizer, C)
            return optimizer

    with pytest.warns(gradclip.ClippingWarning, match=r"gradients to 0\.5 before the step.*no gradient_clip_val"):
        trainer(gradient_clip_val=0.5).fit(Clipped(OPTIMIZERS["SGD"]), data())


def test_the_clipping_of_the_module_warns():
    class Clips(Net):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")

    with (
        pytest.warns(gradclip.ClippingWarning, match=r"gradients to 0\.5 before the step"),
        pytest.warns(UserWarning, match=r"Clips\.configure_gradient_clipping is called at each step, too"),
    ):
        trainer(ClipCallback(C)).fit(Clips(OPTIMIZERS["SGD"]), data())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_norm": [1.0]}, "max_norm must hold one entry for each optimizer, got 1 for 2"),
        ({"max_norm": gradclip.AdaptiveThreshold()}, r"max_norm=\[AdaptiveThreshold\(\), AdaptiveThreshold\(\)\]"),
        ({"max_norm": 1.0, "monitor": gradclip.Monitor()}, r"monitor=\[Monitor\(\), Monitor\(\)\]"),
    ],
)
def test_what_two_optimizers_cannot_share(arguments, message):
    with pytest.raises(ValueError, match=message):
        trainer(ClipCallback(**arguments)).fit(TwoOptimizers(), data())


def test_fit_again():
    kept = []

    class Keeps(Net):
        def configure_optimizers(self):
            kept[:] = kept or [super().configure_optimizers()]
            return kept[0]

    callback, net = ClipCallback(C), Keeps(OPTIMIZERS["SGD"])
    for steps in (12, 24):
        trainer(callback).fit(net, data())
        net.recorded.check(C, steps)
        assert len(callback.clipping) == 1


# Going on, and logs


@EACH_OPTIMIZER
def test_a_resumed_run_goes_on_to_the_last_bit(make, tmp_path):
    def fitted(epochs, path=None):
        net, monitor, callback = Net(make), gradclip.Monitor(), ClipCallback(gradclip.AdaptiveThreshold())
        callback = ClipCallback(gradclip.AdaptiveThreshold(), monitor=monitor)
        runner = trainer(callback, max_epochs=epochs, enable_checkpointing=True, default_root_dir=tmp_path)
        runner.fit(net, data(), ckpt_path=path, weights_only=True if path else None)
        runner.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return [p.tolist() for p in net.parameters()], [(one.norm, one.max_norm) for one in monitor.records]

    weights, steps = fitted(4)
    _, first = fitted(2)
    resumed, second = fitted(4, tmp_path / "2.ckpt")
    assert first + second == steps
    assert resumed == weights
    assert len({max_norm for _, max_norm in steps}) > 6


@pytest.mark.parametrize("make", [OPTIMIZERS["SGD"], OPTIMIZERS["fused AdamW"]])
def test_what_tensorboard_shows(make, tmp_path):
    net = Net(make)
    logger = TensorBoardLogger(tmp_path)
    trainer(ClipCallback(C), logger=logger, log_every_n_steps=2).fit(net, data())
    shown = EventAccumulator(logger.log_dir).Reload()
    values = {name: [event.value for event in shown.Scalars(name)] for name in shown.Tags()["scalars"]}
    raw = net.recorded.raw
    clipped = [norm > C for norm in raw]
    assert values["grad_norm"] == pytest.approx(raw[1::2], rel=1e-4)
    assert values["grad_norm_clipped"] == pytest.approx([min(norm, C) for norm in raw[1::2]], rel=1e-4)
    assert values["clipped_share"] == pytest.approx([sum(clipped[: n + 1]) / (n + 1) for n in range(1, 12, 2)])


def test_what_two_optimizers_log():
    net = TwoOptimizers()
    runner = trainer(ClipCallback(1.0))
    runner.fit(net, data())
    names = {f"{name}_{n}" for name in LOGGED for n in (0, 1)}
    assert names == set(runner.callback_metrics)
    assert float(runner.callback_metrics["grad_norm_0"]) == pytest.approx(net.recorded[0].raw[-1], rel=1e-4)


def test_the_keyword_of_lightning_leads_to_ours():
    with pytest.raises(TypeError, match=r"argument 'gradient_clip_val'\. Pass max_norm= instead\."):
        ClipCallback(gradient_clip_val=1.0)
