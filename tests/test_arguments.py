"""One rule for the arguments of all public calls, and what a call cannot take says what to do."""

import inspect
from collections import defaultdict
from importlib import import_module

import pytest
import torch

import arguments
import gradclip

# Calls with more than two arguments by position, and what has them there. The tests of each integration, and those in
# tests/parity, compare the signatures with the library's.
REPLACES = {
    "clip_grad_norm_": "torch.nn.utils.clip_grad_norm_",
    "adaptive_grad_clip_": "timm.utils.adaptive_clip_grad(parameters, clip_factor, eps, norm_type)",
    "brainstate.clip_grad_norm": "brainstate.nn",
    "jax_privacy.BoundedSensitivityCallable": "jax_privacy.clipping",
    "jax_privacy.clip_and_round_to_grid": "jax_privacy.clipping",
    "jax_privacy.clip_pytree": "jax_privacy.clipping",
    "jax_privacy.clipped_grad": "jax_privacy.clipping",
    "lucid.clip_grad_norm": "lucid.nn.utils",
    "optax.adaptive_grad_clip": "optax",
    "optax.per_example_layer_norm_clip": "optax",
    "tensorflow.clip_by_average_norm": "tf.compat.v1",
    "tensorflow.clip_by_global_norm": "tf",
    "tensorflow.clip_by_norm": "tf",
    "tensorflow.clip_by_value": "tf",
    "torch.clip_grad_norm_": "torch.nn.utils",
    "torch.clip_grad_value_": "torch.nn.utils",
    "torch.clip_grads_with_norm_": "torch.nn.utils",
    "torch.get_total_norm": "torch.nn.utils",
}
# Words that do not have one default, and why.
SEVERAL_DEFAULTS = {
    **dict.fromkeys(("factor", "quantile", "window", "initial", "lower", "upper"), "each rule has levels of its own"),
    "eps": "clip_at_step has it for AGC alone",
    "microbatch_size": "explain_spike makes every gradient, in small batches",
    "method": "explain_spike makes every gradient",
    "nonfinite": "an example that is not finite is left out, a step is not",
    "rule": "two things: what follows the norms, and what becomes of an example",
    "seed": "a check must be repeatable, a private batch must not be",
    "sum_dtype": "a sensitivity has no arrays from whose dtype it could follow",
}
OURS = arguments.functions(gradclip)
LIBRARIES = {
    f"{module.rpartition('.')[2]}.{name}": one
    for module in arguments.MODULES
    for name, one in arguments.functions(import_module(module)).items()
}
CALLS = {**OURS, **arguments.methods(), **LIBRARIES}
# Those that clip or measure all leaves of a tree, or all gradients.
OF_TREES = [name for name in OURS if name.startswith(("clip_by_", "global_norm", "layer_norms", "norm_at", "partial"))]
IN_PLACE = [name for name in OURS if name.endswith("_")]


def test_the_page_is_what_the_command_prints():
    assert arguments.current() == arguments.page()


def test_two_arguments_by_position_unless_a_replaced_function_has_more():
    found = [name for name, one in CALLS.items() if len(arguments.arguments(one)[0]) > 2]
    assert sorted(found) == sorted(REPLACES)
    theirs = list(inspect.signature(torch.nn.utils.clip_grad_norm_).parameters)
    assert theirs[:3] == ["parameters", "max_norm", "norm_type"]


def test_a_word_has_one_default():
    defaults = defaultdict(set)
    for one in OURS.values():
        for each in inspect.signature(one).parameters.values():
            if each.default is not each.empty:
                defaults[each.name].add(repr(each.default))
    assert sorted(name for name, values in defaults.items() if len(values) > 1) == sorted(SEVERAL_DEFAULTS)
    assert defaults["rng"] == {"'system'"}
    assert defaults["skip_above"] == {"inf"}
    assert defaults["ord"] == {"2"}


@pytest.mark.parametrize("name", [*OF_TREES, *IN_PLACE, "grad_norm", "adaptive_grad_clip"])
def test_leaves_can_be_chosen_in_every_call(name):
    taken = inspect.signature(OURS[name]).parameters
    assert (taken["where"].default, taken["integers"].default) == (None, "keep")


def test_calls_in_place_by_norm_take_a_monitor():
    lacking = [name for name in IN_PLACE if "monitor" not in inspect.signature(OURS[name]).parameters]
    assert lacking == ["clip_grad_value_"]


def test_every_call_refuses_the_words_of_the_others_with_advice():
    """Each keyword of a public call, passed to each that lacks it, says what to do."""
    own = [*OURS.values(), *arguments.methods().values()]
    words = {each.name for one in own for some in arguments.arguments(one) for each in some} - {"args", "kwargs"}
    silent = []
    for name, one in CALLS.items():
        taken = inspect.signature(one).parameters
        kinds = {each.kind for each in taken.values()}
        if not taken or inspect.Parameter.VAR_KEYWORD in kinds or name in (*OTHERS, *ON_THE_WAY):
            continue
        for word in sorted(words - set(taken)):
            with pytest.raises(TypeError) as raised:
                one(**{word: None})
            _, found, advice = str(raised.value).partition(f"got an unexpected keyword argument {word!r}. ")
            silent += [] if found and advice.endswith(".") else [(name, word)]
    assert silent == []


# A clipping call with a monitor passes it, and must not get more steps.
ON_THE_WAY = ("Monitor.record",)
# Their classes are the library's own, or records of it.
OTHERS = (
    "keras.ClippingMetrics",
    "jax_privacy.BoundedSensitivityCallable",
    "declearn.L2Clipping",
    "declearn.L2GlobalClipping",
)
OTHERS += ("torch.MaskedDataset", "torch.PoissonSampler", "jax_privacy.with_gradclip")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: gradclip.check_update([1.0], 1.0, 1),
            "check_update() takes 2 positional arguments but 3 were given. Pass the others by name: like=, ord=.",
        ),
        (
            lambda: gradclip.SteadyRule(1.0, 0.5, 9),
            "SteadyRule.__init__() takes 3 positional arguments but 4 were given. "
            "Pass the others by name: window=, initial=, lower=, upper=.",
        ),
        (lambda: gradclip.native_status(1), "native_status() takes 0 positional arguments but 1 was given"),
    ],
)
def test_what_must_be_named_is_said(call, message):
    with pytest.raises(TypeError) as raised:
        call()
    assert str(raised.value) == message
