"""What a run refuses, before anything is released."""

import math
from dataclasses import replace

import numpy as np
import pytest

import gradclip
from gradclip import PoissonBatches, PrivateRun, clipped_sum_sensitivity

ON_GRID = clipped_sum_sensitivity(1.0, batch_size=128, grid=2**20)
FLOATS = clipped_sum_sensitivity(1.0, batch_size=128)


def run_with(sensitivity=ON_GRID, batches=None, **settings):
    batches = batches or PoissonBatches(1000, 0.05, steps=40, pad_to=128)
    return PrivateRun(batches, sensitivity, **{"delta": 1e-5, "noise_multiplier": 1.0} | settings)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"sensitivity": clipped_sum_sensitivity(1.0, "replace_one", batch_size=128)},
            ValueError,
            r"is for 'replace_one', .* Pass \.sensitivity\('add_or_remove_one'\)",
        ),
        ({"sensitivity": 1.0}, TypeError, "must be a gradclip.Sensitivity, got 1.0: a number does not say"),
        (
            {"sensitivity": clipped_sum_sensitivity(1.0, batch_size=127)},
            ValueError,
            "holds for 127 examples, and batches have up to 128. Pass pad_to=batches.pad_to",
        ),
        ({"sensitivity": clipped_sum_sensitivity(1.0)}, ValueError, "the rounding of this sensitivity is unknown"),
        ({"sensitivity": replace(FLOATS, batch_size=None)}, ValueError, "does not say for which batches it holds"),
        ({"sensitivity": clipped_sum_sensitivity(math.inf, batch_size=128)}, ValueError, "no noise can hide"),
        ({"sensitivity": replace(FLOATS, bound=0.0, rounding=0.0)}, ValueError, "the sensitivity is 0"),
        (
            {"sensitivity": gradclip.clipped_grad(max, 1.0).sensitivity(batch_size=128)},
            ValueError,
            "changes the shape of the batch",
        ),
        (
            {"sensitivity": clipped_sum_sensitivity(1.0, batch_size=128, grid=32)},
            ValueError,
            "standard deviation of 32 steps of the grid, and the proof needs 64",
        ),
        ({"batches": [1, 2, 3]}, TypeError, r"batches must be gradclip\.PoissonBatches, got \[1, 2, 3\] of type list"),
        (
            {"batches": PoissonBatches(1000, 0.05, steps=40, pad_to=70)},
            ValueError,
            "a batch does not fit into 70 places .* Pass a larger pad_to",
        ),
        ({"delta": 0.0}, ValueError, "delta must be at least 1e-10"),
        ({"noise_multiplier": 0.0}, ValueError, "noise_multiplier must be positive"),
        ({"noise_multiplier": None}, TypeError, "pass noise_multiplier or epsilon, one of the two"),
        ({"epsilon": 1.0}, TypeError, "pass noise_multiplier or epsilon, one of the two"),
        ({"noise_multiplier": None, "epsilon": -1.0}, ValueError, "epsilon must be positive and finite"),
        ({"rng": np.random.default_rng(0)}, ValueError, "sums on a grid get exact noise only. Pass rng='system'"),
        ({"rng": "numpy"}, TypeError, "rng must be 'system', 'urandom', 'opendp', a numpy.random.Gener"),
        ({"rng": np.zeros(2, np.uint32)}, TypeError, "A JAX key would give every step the same noise"),
        ({"save_every": 0}, ValueError, "save_every must be a whole number"),
        ({"state": 7}, TypeError, r"state must be what state_dict\(\) of a PrivateRun returned, got 7 of type int"),
        ({"state": {"releases": 7}}, ValueError, "state must hold 'parts', as state_dict"),
        ({"state": {"parts": [{"rate": 1.0}]}}, ValueError, "a part of the state lacks 'releases'"),
    ],
)
def test_what_does_not_agree_is_refused(settings, error, message):
    with pytest.raises(error, match=message):
        run_with(**settings)
