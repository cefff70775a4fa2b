"""The Trainer of Hugging Face transformers trains, and each step gets clipped gradients."""

import json

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

import gradclip
from gradclip import clip_at_step
from gradclip._src.step.fold import FusedClipping
from gradclip.integrations.transformers import ClipCallback
from recorded import Recorded

OPTIMIZERS = {
    "default": None,  # AdamW with fused=True
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.05, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
}
EACH_OPTIMIZER = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def model():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    return BertForSequenceClassification(config)


def examples(count=32):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 20, (count, 6), generator=generator)
    return [{"input_ids": one, "labels": one.sum() % 2} for one in ids]


class Records(TrainerCallback):
    """Records what the optimizer of the Trainer gets, from the start of training."""

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        self.recorded = Recorded(optimizer.optimizer)


def trainer(tmp_path, *callbacks, make=None, **settings):
    settings = {"max_grad_norm": 0.0, "max_steps": 8, "per_device_train_batch_size": 4, "logging_steps": 1, **settings}
    args = TrainingArguments(
        tmp_path, use_cpu=True, report_to=settings.pop("report_to", "none"), disable_tqdm=True, **settings
    )
    net = model()
    given = (make(net.parameters()), None) if make else (None, None)
    return Trainer(net, args, train_dataset=examples(), callbacks=[*callbacks], optimizers=given)


def check(recorded, runner, max_norm, steps=8):
    recorded.check(max_norm, steps)
    logged = [one for one in runner.state.log_history if "loss" in one]
    assert [one["grad_norm"] for one in logged] == pytest.approx(recorded.raw, rel=1e-3)
    applied = [min(norm, max_norm) for norm in recorded.raw]
    assert [one["grad_norm_clipped"] for one in logged] == pytest.approx(applied, rel=1e-3)
    clipped = [norm > max_norm for norm in recorded.raw]
    shares = [sum(clipped[: n + 1]) / (n + 1) for n in range(steps)]
    assert [one["clipped_share"] for one in logged] == pytest.approx(shares)
    assert {type(one[name]) for one in logged for name in ("grad_norm", "grad_norm_clipped", "clipped_share")} == {
        float
    }


def test_another_scope(tmp_path):
    runners = []
    for callback in (ClipCallback(0.01, scope="value"), None):
        runner = trainer(tmp_path, *filter(None, [callback]), make=lambda p: torch.optim.SGD(p, lr=0.1))
        if callback is None:
            parameters = list(runner.model.parameters())
            runner.optimizer.register_step_pre_hook(lambda *_, given=parameters: gradclip.clip_grad_value_(given, 0.01))
        runner.train()
        runners.append(runner)
    assert all(map(torch.equal, *(one.model.parameters() for one in runners)))
    assert all("clipped_share" not in one for one in runners[0].state.log_history)


def between(norms):
    """Return a threshold that some of the norms exceed."""
    return sorted(norms)[len(norms) // 2] * 1.0001


@pytest.fixture(scope="module")
def level(tmp_path_factory):
    """Return, for settings of a Trainer, a threshold that some of its steps exceed when nothing clips."""

    def measured(**settings):
        records = Records()
        trainer(tmp_path_factory.mktemp("level"), records, **settings).train()
        with pytest.raises(AssertionError):  # so the check can fail
            records.recorded.check(between(records.recorded.raw), 8)
        return between(records.recorded.raw)

    return measured


@EACH_OPTIMIZER
@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}], ids=str)
def test_each_step_is_clipped(tmp_path, level, make, settings):
    max_norm, records = level(make=make, **settings), Records()
    callback = ClipCallback(max_norm)
    runner = trainer(tmp_path, callback, records, make=make, **settings)
    runner.train()
    check(records.recorded, runner, max_norm)
    assert isinstance(callback.clipping, FusedClipping) == (make in (None, OPTIMIZERS["fused SGD"]))


def test_without_a_callback(tmp_path, level):
    """The lines of users who write no callbacks."""
    max_norm, records = level(), Records()
    runner = trainer(tmp_path, records)
    clipping = clip_at_step(runner.create_optimizer(), max_norm)
    runner.train()
    records.recorded.check(max_norm, 8)
    assert clipping.steps == 8


# Clipping twice


def test_the_clipping_of_the_trainer_is_told_of_without_a_callback(tmp_path):
    runner = trainer(tmp_path, max_grad_norm=1.0)
    clip_at_step(runner.create_optimizer(), 0.1)
    with pytest.warns(gradclip.ClippingWarning, match=r"gradients to 1 before the step clips them.*max_grad_norm=0\.0"):
        runner.train()


@pytest.mark.parametrize("settings", [{"max_grad_norm": 0.5}, {"max_grad_norm": 1.0}])
def test_the_clipping_of_the_trainer_is_an_error(tmp_path, settings):
    message = rf"max_grad_norm is {settings['max_grad_norm']}.*TrainingArguments\(..., max_grad_norm=0.0\)"
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, ClipCallback(1.0), **settings)
    runner = trainer(tmp_path, **settings)
    with pytest.raises(ValueError, match=message):
        ClipCallback(1.0).add_to(runner)
    runner.add_callback(ClipCallback(1.0))
    with pytest.raises(ValueError, match=message):
        runner.train()


@pytest.mark.parametrize(
    ("value", "error"), [("big", TypeError), (None, TypeError), ([1.0], TypeError), (-1.0, ValueError)]
)
def test_a_threshold_that_is_none_is_an_error(value, error):
    with pytest.raises(error, match=r"^max_norm must "):
        ClipCallback(value)


def test_the_default_of_the_trainer_clips(tmp_path):
    args = TrainingArguments(tmp_path, use_cpu=True, report_to="none")
    with pytest.raises(ValueError, match=r"max_grad_norm is 1\.0, by default 1\.0"):
        Trainer(model(), args, callbacks=[ClipCallback(1.0)])


def test_the_keyword_of_the_trainer_leads_to_ours():
    with pytest.raises(TypeError, match=r"argument 'max_grad_norm'\. Pass max_norm= instead\."):
        ClipCallback(max_grad_norm=1.0)


# Going on


@pytest.mark.parametrize("restoring", [False, True])
@EACH_OPTIMIZER
def test_a_resumed_training_goes_on_to_the_last_bit(tmp_path, make, restoring):
    def trained(folder, steps, resumed=None):
        monitor = gradclip.Monitor()
        callback = ClipCallback(gradclip.AdaptiveThreshold(), monitor=monitor)
        settings = {"restore_callback_states_from_checkpoint": restoring} if resumed else {}
        runner = trainer(
            folder, callback, make=make, max_steps=8, save_steps=4, gradient_accumulation_steps=2, **settings
        )
        if not resumed:
            runner.add_callback(StopAt(steps))
        runner.train(resume_from_checkpoint=resumed)
        return [p.tolist() for p in runner.model.parameters()], [(one.norm, one.max_norm) for one in monitor.records]

    weights, steps = trained(tmp_path / "whole", 8)
    _, first = trained(tmp_path / "parts", 4)
    if restoring:
        with pytest.raises(ValueError, match="restore_callback_states_from_checkpoint=True makes callbacks again"):
            trained(tmp_path / "parts", 8, str(tmp_path / "parts" / "checkpoint-4"))
        return
    resumed, second = trained(tmp_path / "parts", 8, str(tmp_path / "parts" / "checkpoint-4"))
    assert first + second == steps
    assert resumed == weights
    assert len({max_norm for _, max_norm in steps}) > 3


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def test_a_fixed_threshold_is_restored_with_the_other_callbacks(tmp_path):
    trainer(tmp_path, ClipCallback(0.25, nonfinite="skip"), save_steps=4, max_steps=4).train()
    saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["stateful_callbacks"]
    settings = {"max_norm": 0.25, "ord": 2, "scope": "global", "eps": None, "unit_axis": None, "nonfinite": "skip"}
    assert saved["ClipCallback"]["args"] == settings | {"where": None, "integers": "keep"}
    runner = trainer(tmp_path, ClipCallback(7.0), save_steps=4, restore_callback_states_from_checkpoint=True)
    runner.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    (callback,) = (one for one in runner.callback_handler.callbacks if isinstance(one, ClipCallback))
    assert (callback.clipping.max_norm, callback.clipping.steps) == (0.25, 4)


def test_a_pattern_is_restored_and_a_function_is_not():
    where = ["*.weight", "classifier.*"]
    saved = ClipCallback(0.25, scope="unit", unit_axis=0, where=where, integers="raise").state()["args"]
    assert ClipCallback(**json.loads(json.dumps(saved))).state()["args"] == saved
    assert (saved["unit_axis"], saved["where"], saved["integers"]) == (0, where, "raise")
    with pytest.raises(ValueError, match="processes or a function"):
        ClipCallback(**ClipCallback(0.25, where=str.isalpha).state()["args"])


def test_only_chosen_parameters_are_clipped(tmp_path):
    net = model()
    args = TrainingArguments(
        tmp_path, use_cpu=True, report_to="none", disable_tqdm=True, max_grad_norm=0.0, max_steps=1
    )
    optimizer = torch.optim.SGD(net.named_parameters(), lr=1.0)
    runner = Trainer(net, args, train_dataset=examples(), optimizers=(optimizer, None))
    callback = ClipCallback(1e-9, where="classifier.*").add_to(runner)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    runner.train()
    moved = {name: (p.detach() - before[name]).norm().item() for name, p in net.named_parameters()}
    assert max(norm for name, norm in moved.items() if name.startswith("classifier.")) <= 1e-8
    assert max(moved.values()) > 1e-4
    assert callback.clipping.steps == 1


def test_a_checkpoint_of_a_training_without_it(tmp_path):
    trainer(tmp_path, max_steps=4, save_steps=4).train()
    callback = ClipCallback(gradclip.AdaptiveThreshold())
    runner = trainer(tmp_path, callback, save_steps=4)
    runner.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert callback.clipping.max_norm.steps == 4
    assert (tmp_path / "checkpoint-8").is_dir()


def test_training_again_goes_on(tmp_path):
    callback = ClipCallback(gradclip.AdaptiveThreshold())
    runner = trainer(tmp_path, callback)
    for steps in (8, 16):
        runner.train()
        assert callback.clipping.max_norm.steps == steps


# Logs


@pytest.mark.parametrize("first", [False, True])
def test_what_tensorboard_shows(tmp_path, level, monkeypatch, first):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "shown"))
    max_norm, records = level(), Records()
    callback = ClipCallback(max_norm)
    runner = trainer(tmp_path, records, *([] if first else [callback]), report_to="tensorboard", logging_steps=2)
    if first:
        assert callback.add_to(runner) is callback
    runner.train()
    shown = EventAccumulator(str(tmp_path / "shown")).Reload()
    values = {name: [event.value for event in shown.Scalars(name)] for name in shown.Tags()["scalars"]}
    raw = records.recorded.raw
    assert values["train/grad_norm"] == pytest.approx(raw[1::2], rel=1e-3)
    assert ("train/grad_norm_clipped" in values) == ("train/clipped_share" in values) == first
    if first:
        applied = [min(norm, max_norm) for norm in raw]
        assert values["train/grad_norm_clipped"] == pytest.approx(applied[1::2], rel=1e-3)
