"""The units of many leaves go to the kernels at once: as if each leaf were clipped alone, whatever lies beside it."""

import itertools
import math
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip
from frameworks import ALL, by_name, numpy_dtype
from gradclip._src.core import pipeline
from part_by_part import at_once, part_by_part
from rational import power_of_norm

HOST = [framework for framework in ALL if not framework.traced and not framework.jit]
SHAPES = ((4, 3), (3,), (), (1,), (2, 3, 2, 2), (3, 4, 2), (0, 3), (3, 0), (1, 6), (70, 40))
LARGE = (300, 300)  # too large to be copied


def trees(dtype, shapes=SHAPES):
    """Gradients and parameters whose units have many sizes, zeros among them, and where no square is lost."""
    rng = np.random.default_rng(1)
    made = []
    for _ in range(2):
        sizes = [
            rng.choice([0.0, 0.01, 0.3, 1.0, 30.0], size=(*shape[:1], *[1] * (len(shape) - 1))) for shape in shapes
        ]
        parts = [
            rng.normal(size=shape) + (1j * rng.normal(size=shape) if "complex" in dtype else 0) for shape in shapes
        ]
        made.append([np.asarray(x * size).astype(numpy_dtype(dtype)) for x, size in zip(parts, sizes, strict=True)])
    return made


CALLS = {
    "units": lambda x, w, **options: gradclip.clip_by_unit_norm(x, 0.9, **options),
    "each its threshold": lambda x, w, **options: gradclip.clip_by_unit_norm(
        x, [0.1 + i for i in range(len(x))], **options
    ),
    "adaptive": lambda x, w, **options: gradclip.adaptive_grad_clip(x, w, clipping=0.3, **options),
}


@pytest.mark.parametrize("framework", HOST, ids=by_name)
@pytest.mark.parametrize("ord", [1, 2])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_as_each_leaf_alone(framework, ord, call):
    for dtype in framework.dtypes:
        given, params = ([framework.array(x, dtype) for x in tree] for tree in trees(dtype))
        for unit_axis in (None, 0, -1, ()):
            found, results = [], []
            for mode in (at_once, part_by_part):
                with mode(), framework.mode():
                    made, norms = call(given, params, ord=ord, unit_axis=unit_axis)
                    found.append(framework.numbers(norms))
                    results.append(framework.numbers(made))
            for x, *both in zip(framework.numbers(given), *results, strict=True):
                first, second = (np.asarray(y) for y in both)
                assert first.dtype == second.dtype == x.dtype
                assert first.shape == second.shape == x.shape
                # What is kept is the same; of what is scaled, a norm may differ in its last bits.
                assert np.array_equal(first == x, second == x)
                step = float(np.finfo(numpy_dtype(dtype)).eps) if dtype != "bfloat16" else 2.0**-7
                assert np.allclose(first.astype(complex), second.astype(complex), rtol=4 * step, atol=1e-7)
            for first, second in zip(*found, strict=True):
                assert (first.dtype, first.shape) == (second.dtype, second.shape)
                assert np.allclose(first, second, rtol=1e-12 if first.dtype == np.float64 else 2e-7, atol=0)


@pytest.mark.parametrize("framework", HOST, ids=by_name)
@pytest.mark.parametrize("adaptive", [False, True])
def test_in_place_as_each_leaf_alone(framework, adaptive):
    given, params = trees(framework.dtypes[-1])
    results = []
    for mode in (at_once, part_by_part):
        with mode():
            made, weights = (
                [framework.array(x.copy(), framework.dtypes[-1]) for x in tree] for tree in (given, params)
            )
            holders = [SimpleNamespace(grad=x) for x in made]
            with framework.mode():
                if adaptive:
                    norms = gradclip.adaptive_grad_clip_(holders, 0.3, params=weights)
                else:
                    norms = gradclip.clip_grad_unit_norm_(holders, 0.9)
            results.append(framework.numbers([holder.grad for holder in holders] + norms))
    for first, second in zip(*results, strict=True):
        assert np.allclose(first, second, rtol=1e-6, atol=1e-12)


def laid_out():
    """Matrices that lie in memory in many ways, the last two where the kernels do not read them."""
    numbers = np.random.default_rng(0).normal(size=(6, 4))
    return [
        numbers,
        np.asfortranarray(numbers),
        np.repeat(numbers, 2, axis=0)[::2],
        np.repeat(numbers, 3, axis=1)[:, ::3],
        numbers[::-1].copy()[::-1],
        numbers.astype(">f8"),
        np.frombuffer(b"\0" + numbers.tobytes(), np.uint8)[1:].view(np.float64).reshape(6, 4),
    ]


@pytest.mark.parametrize("unit_axis", [0, 1, (0, 1), ()])
def test_leaves_may_lie_in_memory_in_any_way(unit_axis):
    ways = laid_out()
    numbers = ways[0].copy()
    (expected,), (norm,) = gradclip.clip_by_unit_norm([numbers], 0.8, unit_axis=unit_axis)
    clipped, norms = gradclip.clip_by_unit_norm(ways, 0.8, unit_axis=unit_axis)
    for way, result, found in zip(ways, clipped, norms, strict=True):
        assert np.allclose(result, expected, rtol=1e-14)
        assert np.allclose(found, norm, rtol=1e-14)
        assert np.array_equal(way, numbers)
    gradclip.clip_grad_unit_norm_([SimpleNamespace(grad=way) for way in ways[:5]], 0.8, unit_axis=unit_axis)
    assert all(np.allclose(way, expected, rtol=1e-14) for way in ways[:5])


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_an_axis_of_one_element_may_have_any_stride(order, axis):
    x = np.random.default_rng(2).normal(size=(1, 4, 6)).transpose(order)
    with at_once():
        (clipped,), (norms,) = gradclip.clip_by_unit_norm([x], 0.8, unit_axis=axis)
    others = tuple(other for other in range(3) if other != axis)
    own = np.linalg.norm(np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1), axis=1)
    assert np.allclose(norms, own, rtol=1e-14)
    assert np.allclose(clipped, x * np.minimum(1.0, 0.8 / np.expand_dims(own, others)), rtol=1e-14)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_kernels_of_convolutions_may_have_their_channels_last(layout):
    weight = torch.randn(80, 40, 5, 5)  # more elements than are copied
    given = weight.to(memory_format=layout)
    with at_once():
        clipped, norms = gradclip.clip_by_unit_norm([given, torch.ones(2)], 3.0)
    assert clipped[0].stride() == given.stride()
    lengths = weight.double().flatten(1).norm(dim=1)
    assert torch.allclose(norms[0].double(), lengths, rtol=1e-6)
    expected = weight.double() * (3.0 / lengths).clamp(max=1.0).view(-1, 1, 1, 1)
    assert torch.allclose(clipped[0].double(), expected, rtol=1e-6)


def test_large_leaves_whose_units_do_not_lie_in_one_piece_are_clipped_alone(monkeypatch):
    alone, measured = [], pipeline._measured
    monkeypatch.setattr(pipeline, "_measured", lambda _, x, *args: alone.append(x[0].shape) or measured(_, x, *args))
    tree = {"a": np.ones((3, 2)), "large": np.ones(LARGE), "rows": np.asfortranarray(np.ones(LARGE)), "z": np.ones(5)}
    clipped, norms = gradclip.clip_by_unit_norm(tree, 0.5)
    assert alone == [LARGE]
    for key, x in tree.items():
        own = np.linalg.norm(x, axis=0)
        assert np.allclose(norms[key], own, rtol=1e-12)
        assert np.allclose(clipped[key], x * 0.5 / own, rtol=1e-12)


@pytest.mark.parametrize("framework", HOST, ids=by_name)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("policy", ["propagate", "zero", "drop"])
def test_a_leaf_that_is_not_finite_changes_no_other(framework, bad, policy):
    rows = [[3.0, 4.0], [0.3, 0.4]]
    tree = [framework.array(x) for x in (rows, [[bad, 1.0], [6.0, 8.0]], rows)]
    weights = [framework.array([[1.0, 0.0]] * 2)] * 3
    with framework.mode():
        results = (
            gradclip.clip_by_unit_norm(tree, 1.0, unit_axis=0, nonfinite=policy)[0],
            gradclip.adaptive_grad_clip(tree, weights, clipping=1.0, unit_axis=0, nonfinite=policy)[0],
        )
    for result in results:
        first, second, third = map(framework.to_numpy, result)
        for leaf in (first, third):
            assert np.allclose(leaf, [[0.6, 0.8], [0.3, 0.4]], rtol=1e-6)
        expected = {"propagate": [math.nan] * 2, "zero": [0.0, 1.0], "drop": [0.0, 0.0]}[policy]
        assert np.allclose(second, [expected, [0.6, 0.8]], rtol=1e-6, equal_nan=True)


@pytest.mark.after_error
def test_nothing_is_written_where_a_leaf_raises():
    grads = [torch.full((2, 2), value) for value in (3.0, math.nan, 3.0)]
    with pytest.raises(FloatingPointError, match=r"parameters\[1\].grad: 4 NaN"):
        gradclip.clip_grad_unit_norm_([SimpleNamespace(grad=x) for x in grads], 0.1, nonfinite="raise")
    assert grads[0].tolist() == grads[2].tolist() == [[3.0, 3.0]] * 2


def test_a_unit_at_its_threshold_stays_beside_others():
    rng = np.random.default_rng(4)
    x = rng.normal(size=(50, 7))
    tree = [x, np.array([[3.0, 4.0], [30.0, 40.0]]), x]
    clipped, _ = gradclip.clip_by_unit_norm(tree, 5.0, unit_axis=0)
    assert clipped[1][0].tolist() == [3.0, 4.0]
    assert all(power_of_norm([row], 2) <= 25 for result in clipped for row in result)


def test_squares_that_are_lost_count():
    tiny, zeros = np.full((2, 2), 1e-200), np.zeros((2, 2))
    norms = gradclip.clip_by_unit_norm([tiny, zeros], 1.0, unit_axis=0)[1]
    assert np.allclose(norms[0], math.sqrt(2) * 1e-200, rtol=1e-12)
    assert not norms[1].any()
    with at_once():
        clipped, _ = gradclip.adaptive_grad_clip(
            [np.array([[3.0, 4.0], [0.0, 0.0]])], [zeros], clipping=0.5, eps=1.0, unit_axis=0
        )
    assert clipped[0].round(6).tolist() == [[0.3, 0.4], [0.0, 0.0]]


def test_only_tensors_that_are_clipped_are_written():
    grads = [torch.ones(2, 2), torch.full((2, 2), 9.0), torch.ones(2, 2)]
    gradclip.clip_grad_unit_norm_([SimpleNamespace(grad=x) for x in grads], 2.0)
    assert [x._version for x in grads] == [0, 1, 0]


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_results_and_norms_have_memory_of_their_own(make):
    tree = [make([[3.0, 4.0], [1.0, 0.0]]), make([5.0])]
    clipped, norms = gradclip.clip_by_unit_norm(tree, 9.0, unit_axis=0)
    clipped[0][0] = 0
    norms[0][1] = 7
    assert tree[0].tolist() == [[3.0, 4.0], [1.0, 0.0]]
    assert (norms[0].tolist(), float(norms[1])) == ([5.0, 7.0], 5.0)


def test_gradients_of_jax_are_replaced():
    holders = [SimpleNamespace(grad=jnp.array([[3.0], [4.0]])), SimpleNamespace(grad=jnp.array([0.5]))]
    kept = holders[1].grad
    norms = gradclip.clip_grad_unit_norm_(holders, 1.0)
    assert np.allclose(holders[0].grad, [[0.6], [0.8]], rtol=1e-6)
    assert holders[1].grad is kept
    assert [float(norm) for norm in norms] == [5.0, 0.5]


def test_derivatives_are_those_of_each_leaf():
    x, w = torch.tensor([[3.0, 4.0]], requires_grad=True), torch.tensor([[1.0, 0.0]], requires_grad=True)
    clipped, _ = gradclip.adaptive_grad_clip([x.detach(), x.detach()], [w, w.detach()], clipping=1.0)
    assert clipped[0].requires_grad
    clipped[0].sum().backward()
    assert torch.allclose(w.grad, torch.tensor([[1.4, 0.0]]))


def test_variables_of_tensorflow_are_assigned_to():
    import tensorflow as tf

    held = {name: tf.Variable(x, trainable=False) for name, x in (("w", [[3.0, 0.3], [4.0, 0.4]]), ("b", [0.5]))}
    norms = gradclip.clip_grad_unit_norm_(held, 1.0, unit_axis=1)
    assert np.allclose(norms["w"].numpy(), [5.0, 0.5], rtol=1e-6)
    assert np.allclose(held["w"].numpy(), [[0.6, 0.3], [0.8, 0.4]], rtol=1e-6)
    assert held["b"].numpy().tolist() == [0.5]


@pytest.mark.parametrize("policy", ["zero", "drop", "propagate"])
def test_what_is_not_finite_is_not_finite_in_a_copy_either(policy):
    matrix = np.array([[math.nan, 3.0], [1.0, 4.0]])
    for x in (matrix.copy(), np.repeat(matrix, 2, axis=1)[:, ::2]):
        gradclip.clip_grad_unit_norm_([SimpleNamespace(grad=x)], 1.0, unit_axis=1, nonfinite=policy)
        first = {"zero": [0.0, 1.0], "drop": [0.0, 0.0], "propagate": [math.nan] * 2}[policy]
        assert np.allclose(x, np.transpose([first, [0.6, 0.8]]), equal_nan=True)


def test_no_gradients_have_no_norms():
    with pytest.warns(UserWarning, match="no parameter has a gradient"):
        assert gradclip.clip_grad_unit_norm_([torch.nn.Parameter(torch.ones(2))], 1.0) == [None]
