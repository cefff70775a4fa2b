"""Settings of Opacus' optimizers that are no numbers, or out of range, are refused in Opacus' words."""

import math

import pytest
import torch

import gradclip
from gradclip.integrations.opacus import AdaClipDPOptimizer, DPOptimizer, DPPerLayerOptimizer

PLAIN = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": 4}
ADAPTIVE = {
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 10.0,
    "min_clipbound": 0.1,
    "unclipped_num_std": 1.0,
}


def made(kind, **settings):
    model = torch.nn.Linear(2, 1)
    more = ADAPTIVE if kind is AdaClipDPOptimizer else {}
    return kind(torch.optim.SGD(model.parameters(), lr=0.1), **PLAIN | more | settings)


@pytest.mark.parametrize("name", ["max_grad_norm", "noise_multiplier"])
@pytest.mark.parametrize("value", ["big", None, [1.0, 2.0], abs, True, gradclip.AdaptiveThreshold()], ids=repr)
def test_what_is_no_number_is_named_as_opacus_names_it(name, value):
    for kind in (DPOptimizer, AdaClipDPOptimizer):
        with pytest.raises(TypeError, match=f"^{name} must be a (real )?number"):
            made(kind, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_grad_norm", math.nan),
        ("max_grad_norm", math.inf),
        ("noise_multiplier", -1.0),
        ("noise_multiplier", math.inf),
    ],
)
def test_what_is_out_of_range_is_named_as_opacus_names_it(name, value):
    with pytest.raises(ValueError, match=f"^{name} must "):
        made(DPOptimizer, **{name: value})


@pytest.mark.parametrize(("value", "error"), [("big", TypeError), (None, TypeError), (math.nan, ValueError)])
def test_the_noise_of_counts_is_checked(value, error):
    with pytest.raises(error, match=r"^unclipped_num_std must be "):
        made(AdaClipDPOptimizer, noise_multiplier=0.5, unclipped_num_std=value)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (1.0, TypeError, r"a list with one threshold for each of the 2 parameters .* got 1\.0 of type float"),
        ("big", TypeError, r"a list with one threshold for each of the 2 parameters .* got 'big' of type str"),
        ([1.0], ValueError, "a list .* for each of the 2 parameters that are trained, got 1"),
        ([1.0, None], TypeError, "a real number .*, got None"),
        ([1.0, -1.0], ValueError, r"not be negative or NaN, got -1\.0"),
    ],
)
def test_thresholds_of_parameters_are_a_list_of_numbers(value, error, message):
    with pytest.raises(error, match=f"^max_grad_norm must (be )?{message}"):
        made(DPPerLayerOptimizer, max_grad_norm=value)


def test_numbers_of_other_types_are_taken():
    assert made(DPOptimizer, max_grad_norm=torch.tensor(2.0), noise_multiplier=1).max_grad_norm == 2.0
    assert made(DPPerLayerOptimizer, max_grad_norm=(1.0, 2)).max_grad_norms == (1.0, 2)
    assert made(DPOptimizer, max_grad_norm=math.inf, noise_multiplier=0.0).max_grad_norm == math.inf
