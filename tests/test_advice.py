"""Names and keywords of other libraries lead to errors that name ours; every name they give is there."""

import importlib
import inspect
import io
import re
import subprocess
import sys
from collections import UserDict
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules

import numpy as np
import pytest
import torch

import gradclip
from gradclip import clip_at_step
from gradclip._src import words
from gradclip._src.advice import _NAMES, advice_on_name, how_to_convert
from gradclip._src.words import with_advice
from gradclip.integrations.torch import clip_grad_norm_, clip_in_backward

TREE = {"w": np.array([3.0, 4.0])}


def advice(name):
    with pytest.raises(AttributeError) as raised:
        getattr(gradclip, name)
    assert not hasattr(gradclip, name)
    return str(raised.value)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("torch", "import gradclip.integrations.torch."),
        ("pytorch", "For the names of pytorch, import gradclip.integrations.torch."),
        ("optax", "import gradclip.integrations.optax."),
        ("keras", "import gradclip.integrations.keras."),
        ("tensorflow", "import gradclip.integrations.tensorflow."),
        ("jax", "Pass arrays of any framework to gradclip's own functions."),
        ("get_total_norm", "Use gradclip.global_norm(tree) for gradients, or gradclip.grad_norm(parameters)."),
        ("clip_grads_with_norm_", "Use gradclip.integrations.torch.clip_grads_with_norm_."),
        ("clip_grad_norm", "Use gradclip.clip_grad_norm_(parameters, max_norm) in place, or "),
        (
            "clip_by_norm",
            "Use gradclip.clip_by_layer_norm(tree, max_norm), which clips each array by its own norm, or ",
        ),
        ("adaptive_gradient_clipping", "Use gradclip.adaptive_grad_clip(grads, params), or "),
        ("AGC", "Use gradclip.adaptive_grad_clip(grads, params), or "),
        ("ZClip", "pass max_norm=gradclip.AdaptiveThreshold() to gradclip.clip_grad_norm_."),
        ("QuantileClip", "pass max_norm=gradclip.AdaptiveThreshold(gradclip.QuantileRule(1, 0.9, window=1_000)) to "),
        ("fold_into", "Use gradclip.clip_at_step(optimizer, max_norm)."),
        ("ClippingMetrics", "Import it from gradclip.integrations.keras."),
        ("skip_spikes", "Import it from gradclip.integrations.optax."),
        ("PrivacyEngine", "Use gradclip.clipped_grad(loss, max_norm), or "),
        ("noise_std", "Use clipped_grad(...).sensitivity().noise_std(noise_multiplier), or "),
    ],
)
def test_a_guessed_name_leads_to_ours(name, ours):
    said = advice(name)
    assert said.startswith(f"module 'gradclip' has no attribute {name!r}. ")
    assert ours in said


@pytest.mark.parametrize(
    "code",
    [
        "from gradclip import get_total_norm",
        "from gradclip import clip_grad_norm_, get_total_norm",
        "import gradclip.get_total_norm",
        "from gradclip.get_total_norm import anything",
    ],
)
def test_an_import_of_a_guessed_name_leads_to_ours(code):
    with pytest.raises(ModuleNotFoundError, match=r"^gradclip has no 'get_total_norm'\. Use gradclip\.global_norm"):
        exec(code)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "from gradclip.integrations import autoclip",
            r"AdaptiveThreshold\(gradclip\.QuantileRule\(1, 0\.9, window=1_000\)\) to",
        ),
        (
            "from gradclip.integrations import nosuch",
            r"It has brainstate, .*, transformers\. Pass arrays of any framework",
        ),
        ("import gradclip.integrations.nosuch", r"It has brainstate, .*, transformers\. Pass arrays of any framework"),
        ("import gradclip.integrations.autoclip", "For a threshold at a quantile of the last norms, pass max_norm="),
        ("from gradclip.integrations.autoclip import QuantileClip", "For a threshold at a quantile of the last norms"),
        ("from gradclip.integrations import pytorch", "import gradclip.integrations.torch"),
        ("from gradclip.integrations.deepspeed import follow", r"Use gradclip\.clip_at_step\(engine, max_norm\)"),
        ("from gradclip.integrations.torch import fold_into", r"Use gradclip\.clip_at_step\(optimizer, max_norm\)"),
        ("from gradclip.integrations.torch import clip_at_step", r"Use gradclip\.clip_at_step\."),
    ],
)
def test_an_import_of_a_guessed_integration_leads_to_ours(code, message):
    with pytest.raises(ImportError, match=rf"^gradclip\.integrations(\.torch)? has no '\w+'\. .*{message}"):
        exec(code)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("from gradclip import bogus", "cannot import name 'bogus' from 'gradclip'"),
        ("import gradclip.bogus", "No module named 'gradclip.bogus'"),
        ("from gradclip.integrations import torch, optax; import torch.optax", "No module named 'torch.optax'"),
    ],
)
def test_imports_of_other_names_fail_as_python_has_it(code, message):
    with pytest.raises(ImportError, match=message):
        exec(code)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("fold_into", "Use gradclip.clip_at_step(optimizer, max_norm)."),
        ("clip_at_step", "Use gradclip.clip_at_step."),
        ("adaptive_clip_grad", "Use gradclip.adaptive_grad_clip(grads, params), or "),
    ],
)
def test_a_name_that_the_integration_of_pytorch_lacks_leads_to_ours(name, ours):
    assert not hasattr(gradclip.integrations.torch, name)
    with pytest.raises(AttributeError) as raised:
        getattr(gradclip.integrations.torch, name)
    assert f"module 'gradclip.integrations.torch' has no attribute {name!r}. {ours}" in str(raised.value)


@pytest.mark.parametrize("name", ["nosuch", "autoclip", "pytorch"])
def test_an_integration_that_is_not_there_gets_the_advice_of_an_import(name):
    with pytest.raises(AttributeError) as raised:
        getattr(gradclip.integrations, name)
    with pytest.raises(ModuleNotFoundError) as imported:
        importlib.import_module(f"gradclip.integrations.{name}")
    said = str(raised.value).removeprefix(f"module 'gradclip.integrations' has no attribute {name!r}. ")
    assert str(imported.value) == f"gradclip.integrations has no {name!r}. {said}"


@pytest.mark.parametrize(
    "name", [one.name for one in iter_modules(gradclip.integrations.__path__) if one.name[0] != "_"]
)
def test_the_name_of_an_integration_leads_to_it(name):
    for code in (f"gradclip.{name}", f"from gradclip import {name}", f"import gradclip.{name}"):
        with pytest.raises((AttributeError, ModuleNotFoundError), match=rf"import gradclip\.integrations\.{name}\.$"):
            exec(code, {"gradclip": gradclip})


# Names that users of the libraries beside them would try.
GUESSED = {
    "torch": "clip_grad_norm clip_grad_value get_total_norm clip_grads_with_norm_ error_if_nonfinite",
    "optax": "clip zero_nans apply_if_finite unitwise_clip tree_norm clip_by_block_rms",
    "tf": "clip_by_norm clip_by_average_norm ClipByGlobalNorm ClipByValue",
    "keras": "clipnorm global_clipnorm clipvalue",
    "opacus": "PrivacyEngine DPOptimizer GradSampleModule BatchMemoryManager get_noise_multiplier RDPAccountant",
    "jax_privacy": "clip_pytree noise_multiplier l2_sensitivity",
    "timm": "dispatch_clip_grad adaptive_clip_grad agc",
    "lightning": "gradient_clip_val clip_gradients configure_gradient_clipping",
    "transformers": "max_grad_norm ClipCallback",
    "deepspeed": "gradient_clipping get_global_norm",
    "fairseq": "clip_grad_norm get_norm",
    "others": "AutoClip ZClip clip_tree clip_layer_norm grad_norms GradientClipping",
    "this project, before": "AdaptiveNorm SpreadThreshold SteadyThreshold QuantileThreshold",
}


def test_guessed_names_get_advice():
    guessed = [name for names in GUESSED.values() for name in names.split()]
    assert len(set(guessed)) > 40
    assert [name for name in guessed if "gradclip." not in advice_on_name(name)] == []


@pytest.mark.parametrize("rule", ["QuantileRule", "SpreadRule", "SteadyRule"])
def test_old_names_of_rules_lead_to_the_new_ones(rule):
    assert advice(rule.replace("Rule", "Threshold")).endswith(f". Use gradclip.{rule}.")


def test_one_finder_is_enough():
    words.advise_on_imports()
    assert [type(finder) for finder in sys.meta_path].count(words.AdviceFinder) == 1


def test_an_unknown_name_gets_no_advice():
    assert advice("bogus") == "module 'gradclip' has no attribute 'bogus'"


def test_a_misspelt_name_is_told_by_python():
    code = "import gradclip; gradclip.clip_by_globl_norm"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Did you mean: 'clip_by_global_norm'?" in done.stderr


def test_python_adds_no_name_of_its_own_to_advice():
    done = subprocess.run(
        [sys.executable, "-c", "import gradclip; gradclip.clip_grads_with_norm_"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.endswith("Use gradclip.integrations.torch.clip_grads_with_norm_.\n")


@pytest.mark.parametrize("name", _NAMES)
def test_names_that_advice_gives_are_there(name):
    for found in re.findall(r"gradclip\.([\w.]*\w)", advice_on_name(name)):
        first, *rest = found.split(".")
        if first == "integrations":
            source = find_spec(f"gradclip.integrations.{rest[0]}").loader.get_source(f"gradclip.integrations.{rest[0]}")
            assert all(f'"{function}"' in source.partition("__all__ = ")[2] for function in rest[1:])
        else:
            assert first in gradclip.__all__
    assert name == name.strip("_").lower()
    assert name not in dir(gradclip)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gradclip.clip_by_global_norm(TREE, 1.0, norm_type=2), "'norm_type'. Pass ord= instead."),
        (lambda: gradclip.global_norm(TREE, p=1), "'p'. Pass ord= instead."),
        (lambda: gradclip.clip_by_global_norm(TREE, clip_norm=1.0), "'clip_norm'. Pass max_norm= instead."),
        (lambda: gradclip.clip_by_value(TREE, max_value=1.0), "'max_value'. Pass clip_value= instead."),
        (lambda: gradclip.clip_grad_value_(TREE, max_norm=1.0), "'max_norm'. Pass clip_value= instead."),
        (lambda: gradclip.adaptive_grad_clip_(TREE, weights=TREE), "'weights'. Pass params= instead."),
        (lambda: gradclip.check_sensitivity(function=max, examples=[]), "'function'. Pass fun= instead."),
        (lambda: gradclip.explain_spike(loss=max, params=[]), "'loss'. Pass fun= instead."),
        (lambda: gradclip.find_max_norm(max, rates=[0.1]), "'rates'. Pass learning_rates= instead."),
        (lambda: gradclip.PrivateQuantile(target=0.5), "'target'. Pass quantile= instead."),
        (lambda: gradclip.clip_at_step(None, 1.0, per_layer=True), "'per_layer'. Pass scope=\"layer\" instead."),
        (
            lambda: gradclip.clip_by_global_norm(TREE, 1.0, monitor=None),
            "'monitor'. Record what it returns: monitor.record(norm, max_norm).",
        ),
        (
            lambda: gradclip.norm_at_most(TREE, 1.0, mask=None),
            "'mask'. Leave it out: it is an argument of gradclip.explain_spike, gradclip.per_example_clip, "
            "gradclip.ClippedFunction.plan.",
        ),
        (
            lambda: gradclip.clip_grad_norm_(TREE, 1.0, error_if_nonfinite=True),
            "'error_if_nonfinite'. Pass nonfinite=\"raise\" instead.",
        ),
        (
            lambda: gradclip.clip_grad_norm_(TREE, 1.0, foreach=True),
            "'foreach'. Leave it out: gradclip does not need it.",
        ),
        (
            lambda: gradclip.AdaptiveThreshold(window=10),
            "'window'. Pass rule=gradclip.QuantileRule(...) instead.",
        ),
        (lambda: clip_grad_norm_([], 1.0, ord=1), "'ord'. Pass norm_type= instead."),
        (
            lambda: clip_grad_norm_([], 1.0, nonfinite="drop"),
            "'nonfinite'. Call gradclip.clip_grad_norm_ instead, which takes it.",
        ),
        (lambda: clip_at_step(None, max_grad_norm=1.0), "'max_grad_norm'. Pass max_norm= instead."),
        (lambda: clip_at_step(None, 1.0, norm_type=1), "'norm_type'. Pass ord= instead."),
        (lambda: clip_at_step(None, clip_grad=1.0, fused=True), "'clip_grad'. Pass max_norm= instead."),
        (lambda: clip_in_backward([], gradient_clip_val=1.0), "'gradient_clip_val'. Pass max_norm= instead."),
        (lambda: gradclip.guard(None, max_grad_norm=1.0), "'max_grad_norm'. Pass max_norm= instead."),
        (lambda: gradclip.clip_grad_norm_([], gradient_clipping=1.0), "'gradient_clipping'. Pass max_norm= instead."),
        (lambda: gradclip.clip_grad_value_([], clipvalue=1.0), "'clipvalue'. Pass clip_value= instead."),
        (lambda: gradclip.clip_by_global_norm(TREE, global_clipnorm=1.0), "'global_clipnorm'. Pass max_norm= instead."),
        (lambda: gradclip.clip_by_unit_norm(TREE, 1.0, axis=0), "'axis'. Pass unit_axis= instead."),
        (
            lambda: gradclip.clip_grad_norm_([], 1.0, unit_axis=0),
            "'unit_axis'. Use gradclip.clip_grad_unit_norm_ in place, or gradclip.clip_by_unit_norm for a tree.",
        ),
        (lambda: gradclip.adaptive_grad_clip(TREE, TREE, clip_factor=1), "'clip_factor'. Pass clipping= instead."),
        (lambda: gradclip.clip_by_layer_norm(grads=TREE, max_norm=1), "'grads'. Pass tree= instead."),
        (lambda: gradclip.clipped_grad(max, l2_clip_norm=1.0), "'l2_clip_norm'. Pass max_norm= instead."),
        (lambda: gradclip.clipped_fun(max, max_grad_norm=1.0), "'max_grad_norm'. Pass max_norm= instead."),
        (
            lambda: gradclip.clipped_grad(max, 1.0, expected_batch_size=4),
            "'expected_batch_size'. Pass normalize_by= instead.",
        ),
        (lambda: gradclip.clipped_grad(max, 1.0, in_axes=(None, 0)), "'in_axes'. Pass batch_argnums= instead."),
        (
            lambda: gradclip.clipped_grad(max, 1.0, noise_multiplier=1.1),
            "'noise_multiplier'. Noise is added to the sum, by gradclip.add_noise(summed, clipped.sensitivity(), "
            "noise_multiplier).",
        ),
        (
            lambda: gradclip.AdaptiveThreshold(quantile=0.9),
            "'quantile'. Pass rule=gradclip.QuantileRule(...) instead.",
        ),
    ],
)
def test_a_guessed_keyword_leads_to_ours(call, message):
    with pytest.raises(TypeError) as raised:
        call()
    assert str(raised.value).endswith(f"() got an unexpected keyword argument {message}")
    assert raised.value.__suppress_context__


def test_a_method_is_called_by_its_public_class():
    with pytest.raises(TypeError, match=r"^ClippedFunction\.sensitivity\(\) got an unexpected keyword"):
        gradclip.clipped_grad(max, 1.0, batch_argnums=1).sensitivity(partial_sums=8)


def test_keywords_are_told_in_compiled_code_too():
    compiled = torch.compile(lambda x: gradclip.clip_by_global_norm(x, 1.0, norm_type=2), backend="eager")
    with pytest.raises(TypeError, match=r"Pass ord= instead\.$"):
        compiled(torch.ones(3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gradclip.clip_by_global_norm(TREE, 1.0, bogus=2), "got an unexpected keyword argument 'bogus'$"),
        (lambda: gradclip.clip_by_value(TREE, 1.0, norm_type=2), "got an unexpected keyword argument 'norm_type'$"),
        (lambda: gradclip.clip_by_global_norm(TREE), "missing 1 required positional argument: 'max_norm'$"),
        (lambda: gradclip.clip_by_global_norm({"w": "text"}, max_norm=1.0), "text"),
    ],
)
def test_other_errors_stay_as_they_are(call, message):
    with pytest.raises(TypeError, match=message) as raised:
        call()
    assert "instead" not in str(raised.value)


def test_a_function_that_takes_any_keyword_keeps_its_own_error():
    @with_advice
    def passed_on(**options):
        raise TypeError(f"own error about {options}")

    with pytest.raises(TypeError, match=r"^own error about \{'norm_type': 2\}$"):
        passed_on(norm_type=2)


def test_signatures_are_those_of_the_functions():
    assert list(inspect.signature(gradclip.clip_by_value).parameters) == ["tree", "clip_value", "where", "integers"]
    assert list(inspect.signature(gradclip.clipped_grad).parameters)[:3] == ["fun", "max_norm", "argnums"]


class Table:
    def to_numpy(self):
        return []


@pytest.mark.parametrize(
    ("leaf", "advice"),
    [
        (UserDict(), "dict(...)"),
        (Table(), "to_numpy()"),
        ("grads.npz", "numpy.load"),
        (b"grads.npz", "numpy.load"),
        (Path("grads.npz"), "numpy.load"),
        (io.BytesIO(), "numpy.load"),
        ((x for x in ()), "clip_grad_norm_"),
        ({1.0}, "list(...)"),
        (range(2), "list(...)"),
    ],
)
def test_advice_fits_what_was_passed(leaf, advice):
    assert advice in how_to_convert(leaf)


def test_there_is_none_for_what_holds_no_arrays():
    assert how_to_convert(object()) == how_to_convert(True) == ""
