"""Settings of Flower's wrappers that are no numbers are refused by their names when the wrapper is made."""

import math
import re

import numpy as np
import pytest
from flwr.serverapp import strategy
from flwr.serverapp.strategy import FedAvg

from gradclip.integrations import flower
from wrapped import every_wrapper

FIXED = {"noise_multiplier": 0.5, "clipping_norm": 1.0, "num_sampled_clients": 4}
ADAPTIVE = {
    "noise_multiplier": 0.1,
    "num_sampled_clients": 20,
    "initial_clipping_norm": 0.1,
    "target_clipped_quantile": 0.5,
    "clip_norm_lr": 0.2,
    "clipped_count_stddev": None,
}


def made(name, **changed):
    settings = FIXED if "Fixed" in name else ADAPTIVE
    return getattr(flower, name)(FedAvg(), **settings | changed), settings


@every_wrapper
def test_settings_that_are_no_numbers_are_named(name):
    _, settings = made(name)
    for setting in settings:
        for value in ("big", [1.0, 2.0], np.ones(2), True):
            with pytest.raises(TypeError, match=f"^{setting} must be a number, got "):
                made(name, **{setting: value})
        with pytest.raises(ValueError, match=rf"^{setting} must not be NaN\."):
            made(name, **{setting: math.nan})


@every_wrapper
def test_settings_may_be_given_by_position_and_as_numbers_of_numpy(name):
    wrapper = getattr(flower, name)(FedAvg(), np.float32(0.5), *([1, 4] if "Fixed" in name else [20]))
    assert wrapper.noise_multiplier >= 0.0
    assert wrapper.num_sampled_clients == (4 if "Fixed" in name else 20)


@every_wrapper
def test_a_call_with_too_few_or_too_many_arguments_fails_as_in_flower(name):
    for arguments in ((FedAvg(), 0.5), (FedAvg(), *[0.5] * 8)):
        with pytest.raises(TypeError) as theirs:
            getattr(strategy, name)(*arguments)
        with pytest.raises(TypeError, match=re.escape(str(theirs.value))):
            getattr(flower, name)(*arguments)


@pytest.mark.parametrize("call", ["clip_inputs_inplace", "adaptive_clip_inputs_inplace"])
@pytest.mark.parametrize(("value", "error"), [(math.nan, ValueError), (-1.0, ValueError), ("big", TypeError)])
def test_the_threshold_is_called_clipping_norm(call, value, error):
    update = [np.array([3.0, 4.0])]
    with pytest.raises(error, match=r"^clipping_norm must "):
        getattr(flower, call)(update, value)
    for compute in (flower.compute_clip_model_update, flower.compute_adaptive_clip_model_update):
        with pytest.raises(error, match=r"^clipping_norm must "):
            compute(update, [np.zeros(2)], value)
    assert update[0].tolist() == [3.0, 4.0]
