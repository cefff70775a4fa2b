"""Derivatives of clipping in MLX are those of PyTorch, in all of MLX's transformations."""

import time

import mlx.core as mx
import numpy as np
import pytest
import torch

import gradclip
from rational import at_most

ROWS = np.array([[3.0, -4.0, 0.5], [0.1, 0.2, -0.3]], np.float32)  # above the threshold and below it
TOWARD = np.array([1.0, 2.0, -0.5], np.float32)
CALLS = {
    "global": lambda x, c: gradclip.clip_by_global_norm(x, c)[0],
    "norm": lambda x, c: gradclip.global_norm(x) * x,
    "order 3": lambda x, c: gradclip.clip_by_global_norm(x, c, ord=3)[0],
    "largest": lambda x, c: gradclip.clip_by_global_norm(x, c, ord=float("inf"))[0],
    "layers": lambda x, c: sum(gradclip.clip_by_layer_norm([x, x * x], c)[0]),
    "value": lambda x, c: gradclip.clip_by_value(x, c),
    "units": lambda x, c: gradclip.clip_by_unit_norm(x[None], c, unit_axis=0)[0][0],
    "adaptive": lambda x, c: gradclip.adaptive_grad_clip(x[None], x[None] * x[None], clipping=0.1, unit_axis=0)[0][0],
    "sum": lambda x, c: gradclip.per_example_clip(x[:, None], c)[0] * x,
}
each_call = pytest.mark.parametrize("name", CALLS)


def of_torch(name, row, c=1.0):
    x, limit = torch.tensor(row, requires_grad=True), torch.tensor(c, requires_grad=True)
    found = torch.autograd.grad((CALLS[name](x, limit) * torch.tensor(TOWARD)).sum(), (x, limit), allow_unused=True)
    return [np.zeros(()) if gradient is None else gradient.numpy() for gradient in found]


def scalar(name):
    return lambda x, c: mx.sum(CALLS[name](x, c) * mx.array(TOWARD))


def near(found, expected):
    np.testing.assert_allclose(np.array(found), expected, rtol=2e-5, atol=2e-6)


@each_call
def test_gradients(name):
    for row in ROWS:
        found = mx.grad(scalar(name), argnums=(0, 1))(mx.array(row), mx.array(1.0))
        for mine, theirs in zip(found, of_torch(name, row), strict=True):
            near(mine, theirs)


@each_call
def test_forward_mode(name):
    for row in ROWS:
        _, (found,) = mx.jvp(lambda x: scalar(name)(x, mx.array(1.0)), [mx.array(row)], [mx.array(TOWARD)])
        near(found, of_torch(name, row)[0] @ TOWARD)


@each_call
def test_gradients_of_each_row(name):
    expected = np.stack([of_torch(name, row)[0] for row in ROWS])
    inner = mx.vmap(mx.grad(scalar(name)), in_axes=(0, None))
    near(inner(mx.array(ROWS), mx.array(1.0)), expected)
    columns = mx.vmap(mx.grad(scalar(name)), in_axes=(1, None), out_axes=1)
    near(columns(mx.array(ROWS.T), mx.array(1.0)), expected.T)


def test_gradients_in_compiled_code():
    compiled = mx.compile(mx.grad(scalar("global")))
    for row in ROWS:
        near(compiled(mx.array(row), mx.array(1.0)), of_torch("global", row)[0])


@each_call
def test_gradients_through_a_batch(name):
    def total(rows, c):
        return mx.sum(mx.vmap(scalar(name), in_axes=(0, None))(rows, c))

    each = [of_torch(name, row) for row in ROWS]
    found, of_threshold = mx.grad(total, argnums=(0, 1))(mx.array(ROWS), mx.array(1.0))
    near(found, np.stack([one[0] for one in each]))
    near(of_threshold, sum(one[1] for one in each))
    _, (forward,) = mx.jvp(
        lambda rows: total(rows, mx.array(1.0)), [mx.array(ROWS)], [mx.array(np.stack([TOWARD] * 2))]
    )
    near(forward, sum(one[0] @ TOWARD for one in each))


def test_forward_mode_of_complex_numbers_and_of_halves():
    clipped = lambda x: gradclip.clip_by_global_norm(x, 1.0)[0]
    _, (expected,) = mx.jvp(clipped, [mx.array([3.0, 4.0])], [mx.array([1.0, 0.0])])
    _, (found,) = mx.jvp(clipped, [mx.array([3.0 + 4.0j])], [mx.array([1.0 + 0.0j])])
    near(found, [complex(*expected.tolist())])
    for dtype in (mx.bfloat16, mx.float16):
        _, (found,) = mx.jvp(clipped, [mx.array(0.5, dtype=dtype)], [mx.array(2.0, dtype=dtype)])
        assert (found.item(), found.dtype) == (2.0, dtype)


def test_gradients_of_a_large_array():
    x = np.random.default_rng(0).random(1 << 20, np.float32)
    length = lambda x: mx.sum(gradclip.clip_by_global_norm(x, 5.0)[0] * x)  # is 5 times the norm
    expected = 5 * x / np.linalg.norm(x.astype(np.float64))
    np.testing.assert_allclose(np.array(mx.grad(length)(mx.array(x))), expected, rtol=2e-5)


def test_an_empty_array_in_a_mapped_axis():
    clipped = mx.vmap(lambda xs: gradclip.clip_by_global_norm(xs, 1.0)[0])
    found = mx.grad(lambda xs: sum(map(mx.sum, clipped(xs))))([mx.zeros((2, 0)), mx.array([[0.25], [0.5]])])
    assert [x.tolist() for x in found] == [[[], []], [[1.0], [1.0]]]


@pytest.mark.parametrize("name", ["global", "norm", "units", "value"])
def test_second_derivatives(name):
    once = mx.grad(lambda x: scalar(name)(x, mx.array(1.0)))
    for row in ROWS:
        found = mx.grad(lambda x: mx.sum(once(x) * mx.array(TOWARD)))(mx.array(row))
        x = torch.tensor(row, requires_grad=True)
        total = (CALLS[name](x, torch.tensor(1.0)) * torch.tensor(TOWARD)).sum()
        (first,) = torch.autograd.grad(total, x, create_graph=True)
        expected = torch.autograd.grad((first * torch.tensor(TOWARD)).sum(), x)[0] if first.requires_grad else 0.0 * x
        near(found, expected.detach().numpy())


def test_a_mask_has_no_derivative():
    rows, mask = mx.array(ROWS), mx.array([True, False])
    found = mx.grad(lambda x: mx.sum(gradclip.per_example_clip(x, 1.0, mask=mask)[0] * mx.array(TOWARD)))(rows)
    near(found[0], of_torch("global", ROWS[0])[0])
    assert found[1].tolist() == [0.0, 0.0, 0.0]


SHAPES = [*((n % 5,) for n in range(60)), *((2, n % 3) for n in range(40)), *[()] * 7]
SIZES = [int(np.prod(shape)) for shape in SHAPES]
EVERY = np.random.default_rng(0).standard_normal(sum(SIZES)).astype(np.float32)
CHANGE = np.random.default_rng(1).standard_normal(sum(SIZES)).astype(np.float32)


def in_parts(flat, dtypes=(mx.float32,)):
    ends = np.cumsum(SIZES)[:-1]
    parts = [x.reshape(shape) for x, shape in zip(np.split(flat, ends), SHAPES, strict=True)]
    return [mx.array(x, dtype=dtypes[i % len(dtypes)]) for i, x in enumerate(parts)]


def as_one(parts):
    return np.concatenate([np.array(x.astype(mx.float32)).reshape(-1) for x in parts])


def test_many_arrays_have_the_derivatives_of_one():
    towards = in_parts(CHANGE)
    loss = lambda xs: sum(mx.sum(x * y) for x, y in zip(gradclip.clip_by_global_norm(xs, 1.0)[0], towards, strict=True))
    expected = mx.grad(lambda x: mx.sum(gradclip.clip_by_global_norm(x, 1.0)[0] * mx.array(CHANGE)))(mx.array(EVERY))
    found = mx.grad(loss)(in_parts(EVERY))
    assert [x.shape for x in found] == SHAPES
    near(as_one(found), np.array(expected))
    _, (forward,) = mx.jvp(lambda *xs: loss(list(xs)), in_parts(EVERY), towards)
    near(forward, float(np.array(expected) @ CHANGE))


def test_many_arrays_in_a_mapped_axis():
    scales = np.array([1.0, 1e-3, 5.0], np.float32)
    rows = [mx.stack([x * scale for scale in scales.tolist()]) for x in in_parts(EVERY)]
    clipped = mx.vmap(lambda xs: gradclip.clip_by_global_norm(xs, 1.0)[0])(rows)
    for i, scale in enumerate(scales):
        near(as_one([x[i] for x in clipped]), EVERY * scale * min(1.0, 1 / np.linalg.norm(EVERY * scale)))


def test_many_arrays_keep_their_dtypes():
    given = in_parts(EVERY, (mx.float32, mx.bfloat16))
    clipped, norm = mx.compile(lambda xs: gradclip.clip_by_global_norm(xs, 1.0))(given)
    assert [(x.shape, x.dtype) for x in clipped] == [(x.shape, x.dtype) for x in given]
    for one in (0, 1):
        np.testing.assert_allclose(as_one(clipped[one::2]), as_one(given[one::2]) / norm.item(), rtol=1e-2, atol=1e-6)
    assert at_most([np.array(x.astype(mx.float32)) for x in clipped], 2, 1.0)


def test_many_arrays_are_traced_in_seconds():
    before = time.process_time()
    mx.compile(lambda xs: gradclip.clip_by_global_norm(xs, 1.0))(in_parts(EVERY) * 5)  # nothing is evaluated
    assert time.process_time() - before < 10  # it grew with the cube of their number
