"""Ordinary batches of private sums: fewer steps before the kernels, and the bits that the general path has."""

import math
import warnings

import numpy as np
import pytest
import torch

import gradclip
from fast_paths import same, without
from gradclip._src.private.sums import clip
from gradclip._src.private.sums.settings import PerExampleSettings


@pytest.fixture
def taken(monkeypatch):
    """Return whether the batch was ordinary, call by call."""
    found, function = [], clip._ordinary

    def noted(*args):
        result = function(*args)
        found.append(result is not None)
        return result

    monkeypatch.setattr(clip, "_ordinary", noted)
    return found


def batch(kind, dtypes, examples=5):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3,), (), (2, 4), (1, 700)]
    made = {
        str(i): torch.randn((examples, *shapes[i % 4]), generator=generator).to(getattr(torch, dtype))
        for i, dtype in enumerate(dtypes)
    }
    return made if kind == "torch" else {key: x.numpy() for key, x in made.items()}


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("dtypes", [["float32"] * 4, ["float64"] * 2, ["float16", "float32", "float64"]])
@pytest.mark.parametrize(
    "settings",
    [{}, {"rule": "normalize"}, {"rule": "automatic", "gamma": 0.1}, {"to_unit": True}, {"sum_dtype": "float64"}],
    ids=str,
)
def test_the_bits_are_those_of_the_general_path(taken, kind, dtypes, settings):
    grads = batch(kind, dtypes)
    for max_norm in (0.5, 2, 1e9, math.inf) if not settings else (0.5,):
        summed, info = gradclip.per_example_clip(grads, max_norm, **settings)
        expected, told = without(clip, ["_ordinary"], gradclip.per_example_clip, grads, max_norm, **settings)
        assert list(summed) == list(expected)
        assert all(same(summed[key], expected[key]) for key in summed)
        assert same(info.norms, told.norms)
        assert same(info.num_clipped, told.num_clipped)
    assert set(taken) == {True}


def with_nan(grads):
    grads["0"][1, 0] = math.nan
    return grads


CAREFUL = {
    "NaN in one example": lambda: with_nan(batch("torch", ["float32", "float64"])),
    "NaN in one example of NumPy": lambda: with_nan(batch("numpy", ["float32"])),
    "an example of zeros in float64": lambda: {"w": np.array([[0.0, 0.0], [3.0, 4.0]])},
    "sums that overflow": lambda: {"w": np.full((2, 3), 1e200)},
    "tiny float64": lambda: {"w": np.array([[1e-200, 2e-200], [3.0, 4.0]])},
    "no examples": lambda: {"w": np.ones((0, 3))},
    "no elements": lambda: {"w": np.ones((2, 0))},
    "another order in memory": lambda: {"w": np.ones((3, 2)).T},
}


@pytest.mark.parametrize("case", CAREFUL)
@pytest.mark.parametrize("nonfinite", ["drop", "zero", "propagate"])
def test_what_the_kernels_leave_open_goes_on_with_the_arrays_taken(taken, case, nonfinite):
    arguments = (CAREFUL[case](), 1.0)
    count = len(next(iter(arguments[0].values())))
    for mask in [None, [False, *[True] * (count - 1)]] if count else [None]:
        summed, info = gradclip.per_example_clip(*arguments, mask=mask, nonfinite=nonfinite)
        expected, told = without(
            clip, ["_ordinary"], gradclip.per_example_clip, *arguments, mask=mask, nonfinite=nonfinite
        )
        for one, other in [*((summed[key], expected[key]) for key in summed), *zip(info, told, strict=True)]:
            assert type(one) is type(other)
            np.testing.assert_array_equal(one, other, strict=True)
    assert set(taken) == {True}


def test_errors_name_the_same_gradients(taken):
    grads = {"a": with_nan(batch("torch", ["float32"]))["0"], "b": torch.ones(5, 2)}
    with pytest.raises(FloatingPointError) as here:
        gradclip.per_example_clip(grads, 1.0, nonfinite="raise")
    with pytest.raises(FloatingPointError) as there:
        without(clip, ["_ordinary"], gradclip.per_example_clip, grads, 1.0, nonfinite="raise")
    assert str(here.value) == str(there.value)
    assert "['a']" in str(here.value)


UNUSUAL = {
    "by layer": (batch("numpy", ["float32"]), {"per_layer": True}),
    "on a grid": (batch("numpy", ["float32"]), {"grid": 1000}),
    "a tree of thresholds": (batch("numpy", ["float32"]), {"max_norm": {"0": 1.0}}),
    "a threshold to differentiate": (batch("torch", ["float32"]), {"max_norm": torch.tensor(1.0, requires_grad=True)}),
    "complex": ({"w": np.ones((2, 3), complex)}, {}),
    "integers": ({"w": np.ones((2, 3), int)}, {}),
    "no common batch": ({"w": np.ones((2, 3)), "b": np.ones((3, 3))}, {}),
    "no batch": ({"w": np.array(1.0)}, {}),
    "no arrays": ({}, {}),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_what_is_not_ordinary_is_left_to_the_general_path(case):
    grads, settings = UNUSUAL[case]
    assert clip._ordinary(grads, PerExampleSettings(**{"max_norm": 1.0, **settings}), None) is None


def test_norms_and_sums_beyond_float32_are_no_mistake_to_warn_of():
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        summed, info = gradclip.per_example_clip(np.full((2, 4), 3e38, np.float32), math.inf)
        assert np.isinf(summed).all()
        assert np.isinf(info.norms).all()
        assert gradclip.per_example_clip([np.full((2, 2), 1e-30, np.float32)], 1e-44)[0][0].max() <= 2e-44


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("listed", [False, True])
def test_masks_and_thresholds_in_arrays_are_ordinary_too(taken, kind, dtype, listed):
    grads = batch(kind, [dtype] * 3)
    grads["0"][4, 0] = math.nan
    inside, max_norm = torch.tensor([True, False, True, True, False]), torch.tensor(0.5)
    arrays = (inside, max_norm) if kind == "torch" else (inside.numpy(), max_norm.numpy())
    mask, threshold = (inside.tolist() if listed else arrays[0]), arrays[1]
    summed, info = gradclip.per_example_clip(grads, threshold, mask=mask)
    expected, told = without(clip, ["_ordinary"], gradclip.per_example_clip, grads, threshold, mask=mask)
    assert all(same(summed[key], expected[key]) for key in summed)
    assert same(info.norms, told.norms)
    assert same(info.num_clipped, told.num_clipped)
    assert info.norms.tolist()[1::3] == [0.0, 0.0]
    assert taken == [True]


def test_other_masks_are_left_to_the_general_path(taken):
    _, info = gradclip.per_example_clip(batch("torch", ["float32"]), 0.1, mask=np.array([True] * 4 + [False]))
    assert int(info.num_clipped) == 4
    with pytest.raises(ValueError, match="mask"):
        gradclip.per_example_clip(batch("torch", ["float32"]), 0.1, mask=torch.tensor([True]))
    assert not any(taken)


def test_masks_without_known_values_are_left_to_the_general_path():
    grads, masks = batch("torch", ["float32"]), torch.tensor([[True] * 5, [True, False] * 2 + [True]])
    each = torch.vmap(lambda mask: gradclip.per_example_clip(grads, 0.1, mask=mask)[0]["0"])(masks)
    for row, mask in zip(each, masks, strict=True):
        torch.testing.assert_close(row, gradclip.per_example_clip(grads, 0.1, mask=mask)[0]["0"])


def test_the_mask_is_checked_before_the_threshold():
    with pytest.raises(TypeError, match="mask must hold"):
        gradclip.per_example_clip(batch("torch", ["float32"]), torch.tensor(-1.0), mask="x")
