"""LightningCLI reads the callback and its threshold from a configuration in YAML."""

import pytest
import torch
from lightning.pytorch.cli import LightningCLI

import gradclip
from gradclip.integrations.lightning import ClipCallback
from test_lightning import Net, data

CONFIG = """
trainer:
  max_epochs: 1
  accelerator: cpu
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: gradclip.integrations.lightning.ClipCallback
      init_args:
        nonfinite: raise
        max_norm: {max_norm}
"""
RULE = "{class_path: gradclip.QuantileRule, init_args: {factor: 1, quantile: 0.9, window: 64}}"
SPREAD = "{class_path: gradclip.AdaptiveThreshold, init_args: {rule: {class_path: gradclip.SpreadRule}}}"
QUANTILE = f"{{class_path: gradclip.AdaptiveThreshold, init_args: {{rule: {RULE}}}}}"
READ = {
    "1.0": 1.0,
    "1": 1.0,
    "[0.5]": [0.5],
    SPREAD: gradclip.AdaptiveThreshold(gradclip.SpreadRule()),
    QUANTILE: gradclip.AdaptiveThreshold(gradclip.QuantileRule(1, 0.9, window=64)),
}

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jsonargparse, about what Lightning calls


class PlainNet(Net):
    def __init__(self):
        super().__init__(lambda p: torch.optim.SGD(p, lr=0.01))

    def train_dataloader(self):
        return data()


@pytest.fixture
def cli(tmp_path, monkeypatch):
    def make(max_norm):
        path = tmp_path / "config.yaml"
        path.write_text(CONFIG.format(max_norm=max_norm))
        monkeypatch.setattr("sys.argv", ["train.py", "--config", str(path)])
        return LightningCLI(PlainNet, run=False, save_config_callback=None, seed_everything_default=False)

    return make


def callback_of(made):
    (callback,) = (one for one in made.trainer.callbacks if isinstance(one, ClipCallback))
    return callback


@pytest.mark.parametrize("max_norm", READ)
def test_thresholds_are_read(cli, max_norm):
    found = callback_of(cli(max_norm))._max_norm
    assert repr(found) == repr(READ[max_norm])


def test_a_number_clips(cli):
    made = cli("1.0")
    made.trainer.fit(made.model)
    made.model.recorded.check(1.0, 12)
    assert callback_of(made).clipping[0].max_norm == 1.0


@pytest.mark.parametrize("max_norm", ["one", "{a: 1}"])
def test_what_is_no_threshold_is_refused(cli, max_norm, capsys):
    with pytest.raises(SystemExit):
        cli(max_norm)
    assert "max_norm" in capsys.readouterr().err


def test_names_are_read(cli, monkeypatch):
    monkeypatch.setattr(f"{__name__}.CONFIG", f"{CONFIG}        where: ['*.weight']\n        integers: raise\n")
    same = callback_of(cli("1.0"))._same
    assert (same["where"], same["integers"]) == (["*.weight"], "raise")
