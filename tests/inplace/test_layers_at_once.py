"""Norms of layers, units and groups that one look settles: to the bit what the pipeline makes of them."""

import math
from functools import partial

import numpy as np
import pytest
import torch

import gradclip
from fast_paths import in_full, same
from gradclip._src.backends.host.backend import Host
from gradclip._src.look import Look

SHAPES = [(3,), (6, 5), (), (4, 1, 3), (0, 2), (2, 3, 2, 2)]
WIDTHS = {"float32": (1.0, 0.3, 20.0), "float64": (1.0, 1e-170, 1e30), "mixed": (1.0, 0.01, 50.0)}
SCALES = 2.0 ** np.array([-3, 0, 2, -20, 5, 1])


@pytest.fixture
def looks(monkeypatch):
    """Return whether one look settled the norms, for each look."""
    found = []
    settle = Look.settled

    def noted(*args):
        result = settle(*args)
        found.append(result is not None)
        return result

    monkeypatch.setattr(Look, "settled", noted)
    return found


def arrays_of(width, scale, seed=0):
    """Return arrays of several shapes and magnitudes; in float64, squares of small ones underflow."""
    random = np.random.default_rng(seed)
    dtypes = ["float32", "float64"] * 3 if width == "mixed" else [width] * len(SHAPES)
    made = [
        np.asarray(random.normal(size=shape) * scale * by, dtype)
        for shape, by, dtype in zip(SHAPES, SCALES, dtypes, strict=True)
    ]
    made[1][2] = 0.0  # units without a norm
    return made


def parameters_of(arrays, weights):
    made = []
    for x, w in zip(arrays, weights, strict=True):
        parameter = torch.nn.Parameter(torch.from_numpy(w.astype(x.dtype)))
        parameter.grad = torch.from_numpy(x.copy())
        made.append(parameter)
    return [torch.nn.Parameter(torch.zeros(2)), *made]


def clipped(call, kind, arrays, weights):
    """Return all arrays that a call gives, and what it makes of its gradients."""
    if kind == "parameters":
        given = parameters_of(arrays, weights)
        norms = call(given)
        return [x for x in norms if x is not None], [x.grad for x in given[1:]]
    if kind == "dict":
        given = {str(index): x.copy() for index, x in enumerate(arrays)}
        norms = call(given)
        return list(norms.values()), list(given.values())
    leaves = [torch.from_numpy(x.copy()) if kind == "tensors" else x.copy() for x in arrays]
    new, norms = call(leaves)
    assert all(same(x, torch.from_numpy(y) if kind == "tensors" else y) for x, y in zip(leaves, arrays, strict=True))
    return list(norms), list(new)


def calls(kind, weights, number):
    """Return the calls of one kind by name; `number` is a threshold."""
    if kind in ("tensors", "arrays"):
        beside = [torch.from_numpy(w) if kind == "tensors" else w for w in weights]
        return {
            "layers": partial(gradclip.clip_by_layer_norm, max_norm=number),
            "layers, each its own": partial(gradclip.clip_by_layer_norm, max_norm=[number, *[number / 3] * 5]),
            "units": partial(gradclip.clip_by_unit_norm, max_norm=number),
            "columns": lambda tree: gradclip.clip_by_unit_norm(tree[1:2] + tree[3:4], number, unit_axis=-1),
            "adaptive": partial(gradclip.adaptive_grad_clip, params=beside, clipping=number),
            "layer_norms": lambda tree: (list(tree), gradclip.layer_norms(tree)),
        }
    beside = None if kind == "parameters" else {str(index): w for index, w in enumerate(weights)}
    found = {
        "layers": partial(gradclip.clip_grad_layer_norm_, max_norm=number),
        "units": partial(gradclip.clip_grad_unit_norm_, max_norm=number),
        "adaptive": partial(gradclip.adaptive_grad_clip_, clipping=number, params=beside),
    }
    if kind == "parameters":
        each = [1.0, number, *[number / 3] * 5]
        found["layers, each its own"] = partial(gradclip.clip_grad_layer_norm_, max_norm=each)
        found["units, each its own"] = partial(gradclip.clip_grad_unit_norm_, max_norm=each)
    return found


@pytest.mark.parametrize("ord", [1, 2])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["parameters", "dict", "tensors", "arrays"])
def test_the_bits_are_those_of_the_pipeline(looks, kind, width, ord):
    settled = {}
    for seed, scale in enumerate(WIDTHS[width]):
        arrays, weights = arrays_of(width, scale, seed), arrays_of("float32", 1.0, 9)
        for number in (scale * 3, scale / 7, scale * 1e-3, math.inf, 2):
            for name, call in calls(kind, weights, number).items():
                one = partial(call, ord=ord) if name not in ("columns", "layer_norms") else call
                looks.clear()
                found = clipped(one, kind, arrays, weights)
                settled[name] = settled.get(name, 0) + all(looks)
                for norms, new in in_full(clipped, one, kind, arrays, weights):
                    assert all(map(same, found[0], norms))
                    assert all(map(same, found[1], new))
    assert all(count >= 8 for name, count in settled.items() if name != "adaptive" or kind != "dict"), settled


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("policy", ["propagate", "drop", "zero"])
def test_a_unit_that_is_not_finite_leaves_the_others_as_they_are(value, policy):
    given = torch.nn.Parameter(torch.zeros(3, 2))
    given.grad = torch.tensor([[3.0, 4.0], [value, 1.0], [0.3, 0.4]])
    norms = gradclip.clip_grad_unit_norm_([given], 1.0, nonfinite=policy)
    assert given.grad[[0, 2]].tolist() == [pytest.approx([0.6, 0.8]), pytest.approx([0.3, 0.4])]
    own = {"propagate": [math.nan] * 2, "drop": [0.0, 0.0], "zero": [0.0, 1.0]}[policy]
    torch.testing.assert_close(given.grad[1], torch.tensor(own), equal_nan=True)
    assert len(norms) == 1
    assert norms[0].shape == (3,)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("value", "number"), [(1.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (1.0, 1e9)])
def test_units_are_copied_for_their_result_only_where_no_look_scales_them_into_it(monkeypatch, value, number, axis):
    copied, found = Host.copied, []
    monkeypatch.setattr(Host, "copied", lambda *args: found.append(None) or copied(*args))
    large = np.ones((300, 300), np.float32)  # its columns are not copied to be rows
    large[0, 0] = value
    gradclip.clip_by_unit_norm(large, number, unit_axis=axis)
    assert len(found) == (0 if axis == 0 and value == 1.0 and number > 0 else 1)


def test_a_whole_number_is_a_threshold():
    given = {"w": np.array([[3.0, 4.0], [0.3, 0.4]], np.float32)}
    gradclip.clip_grad_layer_norm_(given, 2)
    assert np.linalg.norm(given["w"].astype(float)) == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize("axis", [True, (True,), 1.0, "0", 5, (0, 9)])
def test_a_wrong_axis_is_refused_after_a_right_one(axis):
    given = torch.nn.Parameter(torch.zeros(2, 2))
    given.grad = torch.ones(2, 2)
    gradclip.clip_grad_unit_norm_([given], 9.0, unit_axis=1)
    gradclip.clip_grad_unit_norm_([given], 9.0, unit_axis=(1,))
    with pytest.raises((TypeError, ValueError), match="unit_axis"):
        gradclip.clip_grad_unit_norm_([given], 0.1, unit_axis=axis)
    assert given.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_an_empty_gradient_that_is_listed_twice_counts_once():
    empty, other = (torch.nn.Parameter(torch.zeros(n)) for n in (0, 2))
    empty.grad, other.grad = torch.zeros(0), torch.tensor([3.0, 4.0])
    norms = gradclip.clip_grad_layer_norm_([empty, other, empty], 1.0)
    assert list(map(float, norms)) == [0.0, 5.0, 0.0]


def test_a_tensor_that_is_kept_gets_no_new_version():
    small, large = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    small.grad, large.grad = torch.tensor([0.3, 0.4]), torch.tensor([3.0, 4.0])
    gradclip.clip_grad_layer_norm_([small, large], 1.0)
    assert (small.grad._version, large.grad._version) == (0, 1)


def test_weights_that_are_no_arrays_are_refused_and_nothing_is_changed():
    given = torch.nn.Parameter(torch.zeros(2, 2))
    given.grad = torch.ones(2, 2)
    array, lists = np.ones((2, 2)), [[1.0, 1.0], [1.0, 1.0]]
    in_other_containers = (torch.ones(1, 2, 2), {"w": given}, given, array[None])
    of_other_types = ([None], ["w"], [torch.ones(3)], [torch.ones(2, 2, dtype=torch.int32)], [array], [lists])
    for weights in (*of_other_types, *in_other_containers, [given, given]):
        with pytest.raises((TypeError, ValueError)):
            gradclip.adaptive_grad_clip_([given], 0.01, params=weights)
        assert given.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
