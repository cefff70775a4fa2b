"""Functional calls: values, derivatives, and where results lie."""

import math

import numpy as np
import pytest
import torch

import gradclip
from on_gpu import DEVICE, DTYPES, ON, drawn, moved, numbers, on_host, same_bits
from rational import at_most

pytestmark = pytest.mark.gpu
SHAPES = {"w": (13, 5), "b": (5,), "s": (), "empty": (0, 2)}


def tree_of(seed, dtypes, *, requires_grad=False):
    leaves, there = drawn(seed, dtypes, list(SHAPES.values()))
    for x in there if requires_grad else ():
        x.requires_grad_()
    return dict(zip(SHAPES, leaves, strict=True)), dict(zip(SHAPES, there, strict=True))


def wide(tree):
    return {name: x.double() for name, x in tree.items()}


@pytest.mark.parametrize("dtypes", [*((dtype,) for dtype in DTYPES), DTYPES], ids=str)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_results_lie_where_the_leaves_lie(dtypes, requires_grad, max_norm):
    leaves, there = tree_of(30, dtypes, requires_grad=requires_grad)
    clipped, norm = gradclip.clip_by_global_norm(there, max_norm)
    each, norms = gradclip.clip_by_layer_norm(there, max_norm)
    clamped = gradclip.clip_by_value(there, max_norm)
    scalars = [norm, *norms.values(), gradclip.global_norm(there), *gradclip.layer_norms(there).values()]
    assert all(x.device.type == DEVICE.type and x.shape == () for x in scalars)
    assert norm.dtype is (torch.float64 if torch.float64 in dtypes else torch.float32)
    for name, leaf in there.items():
        wanted = torch.float64 if leaf.dtype is torch.float64 else torch.float32
        assert norms[name].dtype in (wanted, norm.dtype)
        for result in (clipped, each, clamped):
            told = (result[name].dtype, result[name].shape, result[name].device)
            assert told == (leaf.dtype, leaf.shape, leaf.device)
    if max_norm == 100.0:
        assert all(same_bits(result.values(), leaves.values()) for result in (clipped, each, clamped))
    assert same_bits(there.values(), leaves.values())  # the input is as it was


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ord", [1, 2, 3, math.inf])
def test_values(dtype, ord):
    leaves, there = tree_of(31, (dtype,))
    wanted = gradclip.layer_norms(wide(leaves), ord)
    with ON.waiting_is_an_error():
        norm, norms = gradclip.global_norm(there, ord), gradclip.layer_norms(there, ord)
        each, told = gradclip.clip_by_layer_norm(there, {"w": 1.0, "b": 0.25, "s": 0.0, "empty": 3.0}, ord=ord)
    assert float(norm) == pytest.approx(float(gradclip.global_norm(wide(leaves), ord)), rel=1e-6)
    for found in (norms, told):
        for name, value in wanted.items():
            assert float(found[name]) == pytest.approx(float(value), rel=1e-6)
    for name, threshold in {"w": 1.0, "b": 0.25, "s": 0.0}.items():
        assert at_most(on_host([each[name]]), ord, threshold)
    assert float(gradclip.global_norm(each["w"], ord)) >= 0.98
    assert float(gradclip.global_norm(each["b"], ord)) >= 0.98 * 0.25


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bound", [0.3, 0.0, 1e-45])
def test_clamped(dtype, bound):
    leaves, there = tree_of(32, (dtype,))
    there["b"][2] = leaves["b"][2] = math.nan
    clamped = on_host(gradclip.clip_by_value(there, bound).values())
    for x, y in zip(clamped, on_host(leaves.values()), strict=True):
        np.testing.assert_array_equal(np.isnan(x), np.isnan(y))
        assert (np.abs(x[~np.isnan(x)]) <= bound).all()
        inside = np.abs(y) <= bound
        np.testing.assert_array_equal(x[inside], y[inside])
    assert int(np.isnan(clamped[1]).sum()) == 1


def derivatives(function, tree):
    """Return the derivative of a sum of the results with weights that are not all equal."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tree.items()}
    result, norm = function(leaves)
    whole = sum((x * torch.arange(1.0, x.numel() + 1, device=x.device).reshape(x.shape)).sum() for x in result.values())
    total = whole + (3 * norm if isinstance(norm, torch.Tensor) else 3 * sum(norm.values()))
    return torch.autograd.grad(total, list(leaves.values()), allow_unused=True)


@pytest.mark.parametrize("function", [gradclip.clip_by_global_norm, gradclip.clip_by_layer_norm])
@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_derivatives_are_those_of_the_cpu(function, max_norm):
    leaves, there = tree_of(33, (torch.float32,))
    found = derivatives(lambda tree: function(tree, max_norm), there)
    wanted = derivatives(lambda tree: function(tree, max_norm), wide(leaves))
    for x, y in zip(on_host(found), on_host(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
    assert any(np.abs(y).max(initial=0.0) > 0.1 for y in on_host(wanted))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", [gradclip.clip_by_global_norm, gradclip.clip_by_layer_norm])
@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_derivatives_at_zero_are_finite(dtype, function, max_norm):
    tree = {"w": torch.zeros(4, 3, dtype=dtype, device=DEVICE), "b": torch.zeros((), dtype=dtype, device=DEVICE)}
    assert all(x.isfinite().all() for x in derivatives(lambda leaves: function(leaves, max_norm), tree))


def test_the_derivative_of_a_norm():
    """It is the leaf over its norm: (3, 4) / 5."""
    x = numbers(3.0, 4.0).requires_grad_()
    (slope,) = torch.autograd.grad(gradclip.global_norm([x]), x)
    np.testing.assert_allclose(on_host([slope])[0], [0.6, 0.8], rtol=1e-6)


def test_transforms_of_torch_func():
    rows = moved([torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])])[0]
    clipped = torch.func.vmap(lambda row: gradclip.clip_by_global_norm(row, 1.0)[0])(rows)
    np.testing.assert_allclose(on_host([clipped])[0], [[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]], rtol=1e-6)
    slope = torch.func.grad(lambda row: gradclip.clip_by_global_norm(row, 10.0)[0].sum())(rows[0])
    assert slope.tolist() == [1.0, 1.0]


def test_a_prefix_of_thresholds():
    """One threshold for a subtree: (3, 4) and 12 have the norm 13 together."""
    tree = {"block": [numbers(3.0, 4.0), numbers(12.0)], "head": numbers(6.0, 8.0)}
    with ON.waiting_is_an_error():
        clipped, norms = gradclip.clip_by_layer_norm(tree, {"block": 6.5, "head": 20.0})
    assert (float(norms["block"]), float(norms["head"])) == (13.0, 10.0)
    results = on_host([*clipped["block"], clipped["head"]])
    np.testing.assert_allclose(np.concatenate(results), [1.5, 2.0, 6.0, 6.0, 8.0], rtol=1e-6)
    assert at_most(results[:2], 2, 6.5)
    assert results[2].tolist() == [6.0, 8.0]


def test_rows():
    """Each row has a norm of its own: 5, 0.5 and 0."""
    x = moved([torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])])[0]
    with ON.waiting_is_an_error():
        clipped = gradclip.clip_by_unit_norm({"w": x}, 1.0)
    found = clipped[0] if isinstance(clipped, tuple) else clipped
    (rows,) = on_host(found.values())
    np.testing.assert_allclose(rows, [[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]], rtol=1e-6)
    assert all(at_most([row], 2, 1.0) for row in rows)
