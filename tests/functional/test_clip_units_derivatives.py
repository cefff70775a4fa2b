"""Derivatives of clipping by units, and what traces it: vmap, jit with traced settings, torch.compile."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip


def formula(x, w, clipping, eps, axis):
    """The clipped gradient in the framework's own operations."""
    xp = torch if isinstance(x, torch.Tensor) else jnp
    norm, size = (xp.sqrt(xp.sum(a * a, axis, keepdims=True)) for a in (x, w))
    threshold = clipping * xp.where(size > eps, size, eps + 0 * size)
    return xp.where(norm <= threshold, x, x * (threshold / norm))


def drawn_pair():
    rng = np.random.default_rng(3)
    x, w = rng.normal(size=(2, 4, 3)).astype(np.float32)
    w[:, 1] *= 1e-5
    x[:, 2] *= 1e-3
    return x, w


@pytest.mark.parametrize("mode", ["reverse", "forward", "second"])
def test_derivatives_in_jax(mode):
    of = {
        "reverse": lambda f: jax.grad(f, (0, 1, 2, 3)),
        "forward": lambda f: jax.jacfwd(f, (0, 1, 2, 3)),
        "second": lambda f: jax.grad(lambda *args: jnp.sum(jax.grad(f, 1)(*args) ** 2), (0, 1)),
    }[mode]
    ours = lambda x, w, c, e: jnp.sum(jnp.sin(gradclip.adaptive_grad_clip(x, w, clipping=c, eps=e)[0]))
    plain = lambda *args: jnp.sum(jnp.sin(formula(*args, 0)))
    args = (*map(jnp.asarray, drawn_pair()), jnp.float32(0.3), jnp.float32(1e-3))
    for mine, theirs in zip(jax.jit(of(ours))(*args), of(plain)(*args), strict=True):
        assert np.allclose(mine, theirs, rtol=2e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch's own first jvp
def test_derivatives_in_pytorch():
    args = [torch.from_numpy(x).double() for x in drawn_pair()]
    args += [torch.tensor(0.3).double(), torch.tensor(1e-3).double()]
    ours = lambda x, w, c, e: gradclip.adaptive_grad_clip(x, w, clipping=c, eps=e)[0].sin().sum()
    plain = lambda *args: formula(*args, 1).sin().sum()
    for of in (torch.func.grad, torch.func.jacfwd):
        for mine, theirs in zip(of(ours, (0, 1, 2, 3))(*args), of(plain, (0, 1, 2, 3))(*args), strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-12)
    leaves = [arg.clone().requires_grad_() for arg in args]
    ours(*leaves).backward()
    for leaf, theirs in zip(leaves, torch.func.grad(plain, (0, 1, 2, 3))(*args), strict=True):
        assert torch.allclose(leaf.grad, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("ord", [1, 2, 3, math.inf])
def test_derivatives_are_finite_at_zero(ord):
    zeros = jnp.zeros((3, 2))
    total = lambda x, w: jnp.sum(gradclip.adaptive_grad_clip(x, w, ord=ord)[0])
    for x, w in ((zeros, zeros), (zeros + 1.0, zeros), (zeros, zeros + 1.0)):
        assert all(bool(jnp.isfinite(g).all()) for g in jax.jit(jax.grad(total, (0, 1)))(x, w))
    total = lambda x, w: gradclip.adaptive_grad_clip(x, w, ord=ord)[0].sum()
    for x in (torch.zeros(3, 2), torch.ones(3, 2)):
        assert all(g.isfinite().all() for g in torch.func.grad(total, (0, 1))(x, torch.zeros(3, 2)))


def test_derivative_of_a_threshold():
    x = jnp.array([[3.0, 0.3], [4.0, 0.4]])
    slope = jax.grad(lambda c: jnp.sum(gradclip.clip_by_unit_norm(x, c)[0]))(1.0)
    assert float(slope) == pytest.approx(1.4)
    threshold = torch.tensor(1.0, requires_grad=True)
    gradclip.clip_by_unit_norm(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), threshold)[0].sum().backward()
    assert float(threshold.grad) == pytest.approx(1.4)


def test_vmap():
    x, w = drawn_pair()
    batch = jnp.stack([x, 3 * x, 0 * x])
    found = jax.vmap(lambda x: gradclip.adaptive_grad_clip(x, w, clipping=0.3)[0])(batch)
    tensors = torch.vmap(lambda x: gradclip.adaptive_grad_clip(x, torch.from_numpy(w), clipping=0.3, unit_axis=1)[0])(
        torch.from_numpy(np.array(batch))
    )
    for one, mine, other in zip(batch, found, tensors, strict=True):
        alone = gradclip.adaptive_grad_clip(np.asarray(one), w, clipping=0.3)[0]
        assert np.allclose(mine, alone, rtol=1e-6, atol=0)
        assert np.allclose(other, alone, rtol=1e-6, atol=0)


def test_traced_settings():
    x, w = drawn_pair()
    known = gradclip.adaptive_grad_clip(x, w, clipping=0.25, eps=2.0**-10)[0]
    found = jax.jit(lambda c, e: gradclip.adaptive_grad_clip(jnp.asarray(x), w, clipping=c, eps=e)[0])(0.25, 2.0**-10)
    assert np.allclose(found, known, rtol=1e-6, atol=0)
    assert not np.asarray(jax.jit(lambda c: gradclip.adaptive_grad_clip(x, w, clipping=c)[0])(-1.0)).any()


@pytest.mark.parametrize("adaptive", [False, True])
def test_compiled_by_pytorch(adaptive):
    x, w = map(torch.from_numpy, drawn_pair())
    function = gradclip.adaptive_grad_clip if adaptive else lambda x, w: gradclip.clip_by_unit_norm(x, 0.01)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for mine, theirs in zip(compiled(x, w), function(x, w), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("clipping", "expected"), [(0.0, 0.0), (0.5, 1.0)])
def test_derivatives_beside_an_infinite_eps_are_those_of_a_large_one(clipping, expected):
    def clipped(x, w):
        return gradclip.adaptive_grad_clip(x, w, clipping=clipping, eps=math.inf)[0].sum()

    x, w = jnp.ones((2, 3)), jnp.ones((2, 3))
    assert [one.tolist() for one in jax.grad(clipped, (0, 1))(x, w)] == [[[expected] * 3] * 2, [[0.0] * 3] * 2]
    assert jax.jvp(clipped, (x, w), (x, w))[1] == 6 * expected
