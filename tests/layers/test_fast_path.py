"""The fast path of many layers: to the bit what the general path makes of ordinary calls, nothing for others."""

import math
import warnings

import numpy as np
import pytest
import torch

import gradclip
from fast_paths import same, without
from gradclip.core.norms import Order
from gradclip.layers import fast_path

DOORS = ("layer_norms", "clip_by_layer_norm", "clip_grad_layer_norm_")
DTYPES = {"torch": ("float16", "bfloat16", "float32", "float64"), "numpy": ("float16", "float32", "float64")}


def arrays(kind, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3,), (2, 5), (), (700, 100), (4, 1, 3)]
    made = [(torch.randn(shape, generator=generator) * 10).to(getattr(torch, dtype)) for shape in shapes]
    return made if kind == "torch" else [x.numpy() for x in made]


def holders(kind, tree):
    copies = [x.clone() if kind == "torch" else x.copy() for x in tree]
    if kind == "numpy":
        return copies, lambda: copies
    parameters = [torch.nn.Parameter(torch.zeros_like(x)) for x in copies]
    for parameter, grad in zip(parameters, copies, strict=True):
        parameter.grad = grad
    return parameters, lambda: [parameter.grad for parameter in parameters]


@pytest.mark.parametrize("ord", [1, 2])
@pytest.mark.parametrize(("kind", "dtype"), [(kind, dtype) for kind in DTYPES for dtype in DTYPES[kind]])
def test_the_bits_are_those_of_the_general_path(kind, dtype, ord):
    tree = arrays(kind, dtype)
    norms = gradclip.layer_norms(tree, ord)
    assert fast_path.layer_norms(tree, Order.parse(ord)) is not None
    assert all(map(same, norms, without(fast_path, DOORS, gradclip.layer_norms, tree, ord)))
    for max_norm in (1.0, 10, 1e9, [0.1, 1.0, 2, math.inf, 3.0]):
        assert fast_path.clip_by_layer_norm(tree, max_norm, Order.parse(ord)) is not None
        clipped, before = gradclip.clip_by_layer_norm(tree, max_norm, ord=ord)
        expected, told = without(fast_path, DOORS, gradclip.clip_by_layer_norm, tree, max_norm, ord=ord)
        assert all(map(same, clipped, expected))
        assert all(map(same, before, told))
        assert not any(x is y for x, y in zip(clipped, tree, strict=True))
        (given, grads), (others, expected_grads) = holders(kind, tree), holders(kind, tree)
        told = without(fast_path, DOORS, gradclip.clip_grad_layer_norm_, others, max_norm, ord)
        assert all(map(same, gradclip.clip_grad_layer_norm_(given, max_norm, ord), told))
        assert all(map(same, grads(), expected_grads()))


def with_one(other):
    return [np.array([3.0, 4.0]), other]


UNUSUAL = {
    "NaN in one layer": (with_one(np.array([math.nan])), 1.0, 2),
    "zeros in float64": (with_one(np.zeros(2)), 1.0, 2),
    "another dtype": (with_one(np.ones(2, np.float32)), 1.0, 2),
    "the largest magnitude": (with_one(np.ones(2)), 1.0, math.inf),
    "as large as the threshold": (with_one(np.ones(4)), [1.0, 2.0], 2),
    "a negative threshold": (with_one(np.ones(2)), [1.0, -1.0], 2),
    "a threshold in an array": (with_one(np.ones(2)), [1.0, np.float32(1.0)], 2),
    "a threshold too few": (with_one(np.ones(2)), [1.0], 2),
    "integers": (with_one(np.ones(2, int)), 1.0, 2),
    "complex": ([np.ones(2, complex)], 1.0, 2),
    "nothing": ([], 1.0, 2),
    "nested": ([[np.ones(2)], np.ones(2)], [1.0, 1.0], 2),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_what_is_not_ordinary_is_left_to_the_general_path(case):
    tree, max_norm, ord = UNUSUAL[case]
    assert fast_path.clip_by_layer_norm(tree, max_norm, Order.parse(ord)) is None
    assert fast_path.clip_grad_layer_norm_(tree, max_norm, Order.parse(ord)) is None


def test_gradients_that_are_missing_or_shared_are_left_to_the_general_path():
    given, _ = holders("torch", [torch.ones(2), torch.ones(3)])
    assert fast_path.clip_grad_layer_norm_([given[0], torch.nn.Parameter(torch.ones(2))], 1.0, Order(2.0)) is None
    given[1].grad = None
    assert fast_path.clip_grad_layer_norm_(given, 1.0, Order(2.0)) is None
    assert fast_path.clip_grad_layer_norm_([given[0], given[0]], 1.0, Order(2.0)) is None
    assert fast_path.clip_grad_layer_norm_(tuple(given[:1]), 1.0, Order(2.0)) is None


@pytest.mark.parametrize("max_norm", [1.0, 100.0])
def test_negative_and_conjugated_views_keep_their_signs(max_norm):
    conjugated = torch.full((3,), 3 + 4j).conj()
    for view in (conjugated, conjugated.imag):
        scale = min(1.0, max_norm / float(view.norm()))
        expected = view.resolve_conj().resolve_neg() * scale
        torch.testing.assert_close(gradclip.clip_by_layer_norm([view, view], max_norm)[0][1], expected)
        given, _ = holders("torch", [torch.zeros(3, dtype=view.dtype)] * 2)
        for parameter in given:
            parameter.grad = (
                torch.full((3,), 3 + 4j).conj() if view.is_complex() else torch.full((3,), 3 + 4j).conj().imag
            )
        gradclip.clip_grad_layer_norm_(given, max_norm)
        torch.testing.assert_close(given[0].grad.resolve_conj().resolve_neg(), expected)


def test_layers_that_are_kept_are_not_written(tmp_path):
    np.ones(16, np.float32).tofile(tmp_path / "gradient")
    mapped = np.memmap(tmp_path / "gradient", np.float32, "r")
    given, grads = holders("torch", [torch.ones(16), torch.ones(16)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of memory that cannot be written
        given[0].grad = torch.from_numpy(np.asarray(mapped))
    before = [grad._version for grad in grads()]
    assert gradclip.clip_grad_layer_norm_(given, [9.0, 1.0]) is not None
    assert [grad._version for grad in grads()] == [before[0], before[1] + 1]


def test_norms_beyond_float32_are_no_mistake_to_warn_of():
    large = np.full(4, 3e38, np.float32)
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        assert gradclip.layer_norms([large, large]) == [math.inf, math.inf]
        assert gradclip.clip_by_layer_norm([large, large], [1.0, 1e300])[1] == [math.inf, math.inf]
        assert gradclip.clip_grad_layer_norm_([large.copy(), large.copy()], 1.0) == [math.inf, math.inf]
        assert gradclip.layer_norms([np.full(2, 1e-310)] * 2)[0] > 0
        assert gradclip.clip_by_layer_norm([np.ones(3)] * 2, 1e-310)[0][0].max() < 1e-310


def test_thresholds_in_another_tree_are_left_to_the_general_path():
    tree = {"w": np.ones(3), "b": np.ones(3)}
    assert fast_path.clip_by_layer_norm(tree, {"w": 1.0, "b": 1.0}, Order(2.0)) is not None
    assert fast_path.clip_by_layer_norm(tree, [1.0, 1.0], Order(2.0)) is None
    assert fast_path.clip_by_layer_norm({"x": tree}, {"x": 1.0}, Order(2.0)) is None
