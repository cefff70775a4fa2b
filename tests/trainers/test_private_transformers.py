"""Private gradients of models from transformers: every method gives the sum of the loop, or an error that names a way.

The models have two layers of width 32, and matrices that come in factors.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers.utils import import_utils

import gradclip
from gradclip._src.private.batching.masks import masks_unread

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
WORDS, LENGTH = 128, 6
SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
EVEN = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # the loop draws other numbers


def gpt2(**more):
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    size = {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=WORDS, **size, **drop, **more))


def llama(**more):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **SMALL, **more))


def mistral(**more):
    config = transformers.MistralConfig(num_key_value_heads=2, sliding_window=3, **SMALL, **more)
    return transformers.MistralForCausalLM(config)


def bert(**more):
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, **EVEN, **more))


def roberta(**more):
    config = transformers.RobertaConfig(pad_token_id=0, **SMALL, **EVEN, **more)
    return transformers.RobertaForSequenceClassification(config)


def t5(**more):
    size = {"d_model": 32, "d_kv": 8, "d_ff": 128, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    config = transformers.T5Config(vocab_size=WORDS, dropout_rate=0.0, decoder_start_token_id=0, **size, **more)
    return transformers.T5ForConditionalGeneration(config)


MODELS = {make.__name__: make for make in (gpt2, llama, mistral, bert, roberta, t5)}
PADDINGS = ("none", "right", "left")
METHODS = ("materialize", "ghost", "auto")


def made(name, *, lora=None, **more):
    torch.manual_seed(1)
    model = MODELS[name](**more)
    if lora is not None:
        kind = "SEQ_CLS" if name in ("bert", "roberta") else None
        turned = {"fan_in_fan_out": name == "gpt2", "init_lora_weights": False, "task_type": kind}
        model = get_peft_model(model, LoraConfig(r=4, **turned, **lora))
    return model.train()


def batch(name, padding):
    """Return words, the mask and labels of four examples, of which the first has no padding."""
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(3, WORDS, (4, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < torch.tensor([6, 4, 3, 2])[:, None]).long()
    mask = {"none": torch.ones_like(mask), "right": mask, "left": mask.flip(1)}[padding]
    words[mask == 0] = 0
    labels = torch.tensor([0, 1, 1, 0]) if name in ("bert", "roberta") else words.where(mask == 1, -100)
    return words, mask, labels


def summed(model, examples, method, *, masked=True):
    """Return the clipped sum of the gradients of the parameters that are trained, and the examples' norms."""

    def loss(params, words, mask, labels):
        given = {"input_ids": words, "labels": labels} | ({"attention_mask": mask} if masked else {})
        return torch.func.functional_call(model, params, (), given).loss

    params = {name: x.detach() for name, x in model.named_parameters() if x.requires_grad}
    clipped = gradclip.clipped_grad(loss, 0.5, batch_argnums=(1, 2, 3), method=method, return_norms=True)
    total, outputs = clipped(params, *examples)
    if method == "ghost":
        assert clipped.plan(params, *examples).ghost or max(x.numel() for x in params.values()) < 4096
    return total, outputs.norms


def check(model, examples, methods=METHODS, **settings):
    total, norms = summed(model, examples, "loop", **settings)
    assert norms.min() > 0.5
    for method in methods:
        found, found_norms = summed(model, examples, method, **settings)
        torch.testing.assert_close(found, total, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found_norms, norms, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("padding", "attention"), [*zip(PADDINGS, ["sdpa"] * 3, strict=True), ("right", "eager")])
@pytest.mark.parametrize("name", MODELS)
def test_a_padding_mask_gives_the_sum_of_the_loop(name, padding, attention):
    check(made(name, attn_implementation=attention), batch(name, padding))


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_no_mask_gives_the_sum_of_the_loop(name):
    check(made(name), batch(name, "none"), masked=False)


@pytest.mark.parametrize(("lora", "checkpointed"), [({}, False), ({}, True), ({"use_dora": True}, False)])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_adapters_give_the_sum_of_the_loop(name, lora, checkpointed):
    model = made(name, lora=lora)
    if checkpointed:
        model.gradient_checkpointing_enable()
    check(model, batch(name, "right"), METHODS[1:] if checkpointed else METHODS)


@pytest.mark.parametrize("name", MODELS)
def test_checkpointing_gives_the_sum_of_the_loop_or_an_error(name):
    model, examples = made(name), batch(name, "right")
    model.gradient_checkpointing_enable()
    check(model, examples, METHODS[1:])
    with pytest.raises(RuntimeError, match=r'pass method="loop".*"auto" or "ghost".*gradient_checkpointing_disable'):
        summed(model, examples, "materialize")
    model.gradient_checkpointing_disable()
    model.disable_input_require_grads()
    check(model, examples, ["materialize"])


@pytest.mark.parametrize("method", ["loop", *METHODS])
@pytest.mark.parametrize("lora", [None, {}], ids=["all", "LoRA"])
@pytest.mark.parametrize("name", ["llama"])
def test_reentrant_checkpointing_is_refused(name, lora, method):
    model = made(name, lora=lora)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(RuntimeError, match=r"loses gradients here\. Pass use_reentrant=False .*_checkpointing_disable"):
        summed(model, batch(name, "right"), method)


@pytest.mark.parametrize("method", METHODS)
def test_what_vmap_cannot_run_names_the_loop(method):
    config = transformers.BloomConfig(vocab_size=WORDS, hidden_size=32, n_layer=2, n_head=4)
    model, examples = transformers.BloomForCausalLM(config).train(), batch("bloom", "right")
    assert summed(model, examples, "loop")[1].all()
    with pytest.raises(RuntimeError, match=r'For one example it works: pass method="loop"'):
        summed(model, examples, method)


@pytest.mark.parametrize("method", ["materialize", "auto"])
def test_transformers_is_left_as_it_was(method):
    before = import_utils.is_jax_jitting
    seen = []

    def loss(params, words):
        seen.append(import_utils.is_jax_jitting)
        if len(words) < LENGTH:
            raise ValueError("words are missing")
        return params["w"][words].sum()

    clipped = gradclip.clipped_grad(loss, 1.0, method=method, keep_batch_dim=False)
    params, words = {"w": torch.ones(WORDS, 32)}, batch("gpt2", "right")[0]
    clipped(params, words)
    assert before not in seen
    assert import_utils.is_jax_jitting is before
    with pytest.raises(ValueError, match="words are missing"):
        clipped(params, words[:, 1:])
    assert import_utils.is_jax_jitting is before


def test_the_last_of_two_threads_leaves_transformers_as_it_was():
    before, (first, second) = import_utils.is_jax_jitting, (masks_unread(import_utils), masks_unread(import_utils))
    with ThreadPoolExecutor(1) as other:
        first.__enter__()
        other.submit(second.__enter__).result()
        first.__exit__(None, None, None)
        assert import_utils.is_jax_jitting is not before
        other.submit(second.__exit__, None, None, None).result()
    assert import_utils.is_jax_jitting is before


def test_a_compiled_model_reads_masks_as_before():
    model, (words, mask, _) = made("gpt2").eval(), batch("gpt2", "right")
    expected = model(input_ids=words, attention_mask=mask).logits
    summed(model, batch("gpt2", "right"), "auto")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(input_ids=words, attention_mask=mask).logits, expected)
