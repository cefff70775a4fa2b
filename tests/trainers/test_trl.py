"""Trainers of TRL train, by SFT, DPO and GRPO, and each step gets clipped gradients."""

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from gradclip.integrations.transformers import ClipCallback
from recorded import Recorded

WORDS = [f"w{number}" for number in range(28)]
TEXTS = [" ".join(WORDS[(start + 3 * step) % 28] for step in range(8)) for start in range(16)]


def tokenizer():
    known = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    whole = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    whole.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=whole, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def reward(completions, **others):
    return [float(len(set(text.split()))) for text in completions]


def sft(settings):
    args = SFTConfig(max_length=16, **settings)
    return SFTTrainer(model(), args, train_dataset=Dataset.from_dict({"text": TEXTS}), processing_class=tokenizer())


def dpo(settings):
    rows = {"prompt": TEXTS, "chosen": [" w1 w2"] * 16, "rejected": [" w3 w4"] * 16}
    args = DPOConfig(max_length=16, **settings)
    return DPOTrainer(model(), model(), args, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer())


def grpo(settings):
    args = GRPOConfig(num_generations=4, max_completion_length=6, **settings)
    rows = Dataset.from_dict({"prompt": TEXTS})
    return GRPOTrainer(model(), reward, args, train_dataset=rows, processing_class=tokenizer())


class Records(TrainerCallback):
    def __init__(self, recorded):
        self.recorded = recorded

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        self.recorded.append(Recorded(optimizer.optimizer))


@pytest.mark.parametrize("make", [sft, dpo, grpo])
def test_each_step_is_clipped(make, tmp_path):
    settings = {"max_steps": 6, "per_device_train_batch_size": 4, "logging_steps": 1, "learning_rate": 0.01}
    made = make(
        {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "max_grad_norm": 0.0, "bf16": False}
        | {"disable_tqdm": True, "gradient_checkpointing": False, **settings}
    )
    ClipCallback(0.5).add_to(made)
    recorded = []
    made.add_callback(Records(recorded))
    made.train()
    (found,) = recorded
    assert len(found.used) == 6
    assert max(found.raw) > 0.5
    for raw, used in zip(found.raw, found.used, strict=True):
        assert used == pytest.approx(min(raw, 0.5), rel=1e-3, abs=1e-6)
    logged = [line["grad_norm"] for line in made.state.log_history if "grad_norm" in line]
    assert logged == pytest.approx(found.raw, rel=1e-4)
