"""Derivatives of clipping in MLX are those of PyTorch, in all of MLX's transformations."""

import mlx.core as mx
import numpy as np
import pytest
import torch

import gradclip

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
