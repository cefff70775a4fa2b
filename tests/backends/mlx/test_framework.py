"""Arrays that MLX's CPU computes: views of their values, and new arrays of MLX as results."""

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
import torch

import gradclip
from gradclip._src.backends.mlx.framework import HOST, MLX, traced


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_results_have_the_dtype_and_the_layout_does_not_matter(dtype):
    x = mx.arange(1, 13).reshape(3, 4).astype(getattr(mx, dtype))
    for given in (x, x.T, x[:, ::2], x[1], mx.broadcast_to(x[0], (2, 4)), x[0, 0]):
        clipped, norm = gradclip.clip_by_global_norm(given, 0.5)
        assert clipped.dtype == given.dtype
        assert clipped.shape == given.shape
        assert norm.dtype == (mx.float64 if dtype == "float64" else mx.float32)
        wide = np.array(given.astype(mx.complex64 if dtype == "complex64" else mx.float32))
        assert norm.item() == pytest.approx(np.linalg.norm(wide.ravel()), rel=1e-6)
        found = np.array(clipped.astype(mx.complex64 if dtype == "complex64" else mx.float32))
        np.testing.assert_allclose(found, wide * 0.5 / norm.item(), rtol=1e-2 if "16" in dtype else 1e-6)


def test_results_are_new_and_what_needs_no_clipping_keeps_its_bits():
    bits = np.array([0x7F80, 0x8000, 0x0001, 0x3F80], np.uint16)  # inf, -0, a subnormal number, 1
    for start in (0, 1):
        x = mx.array(bits[start:]).view(mx.bfloat16)
        clipped, _ = gradclip.clip_by_global_norm(x, 2.0, nonfinite="zero")
        assert clipped is not x
        found = np.array(clipped.view(mx.uint16))
        assert found.tolist() == np.where(bits[start:] == 0x7F80, 0, bits[start:]).tolist()


def test_arrays_are_computed_when_they_are_asked_for():
    x = mx.array([3.0, 4.0])
    assert gradclip.global_norm({"x": x * 2, "y": None}).item() == 10.0
    assert HOST is MLX.backend([x], ())
    assert not traced([x, x * 2])
    seen = []
    mx.vmap(lambda x: seen.append((traced([x]), traced([mx.ones(2)]))) or x)(mx.ones((2, 2)))
    assert (True, False) in seen


def test_what_is_kept_does_not_follow_assignments():
    x = mx.array([3.0, 4.0])
    kept = MLX.kept(x)
    result, _ = gradclip.clip_by_global_norm(x, 9.0)
    layers, _ = gradclip.clip_by_layer_norm([x, x * 2], 5.0)
    x[0] = 7.0
    assert kept.tolist() == result.tolist() == layers[0].tolist() == [3.0, 4.0]
    result[1] = 8.0
    assert x.tolist() == [7.0, 4.0]


def test_arrays_in_grad_are_replaced():
    class Weights:
        grad = mx.array([3.0, 4.0])

    assert gradclip.clip_grad_norm_([Weights], 1.0).item() == 5.0
    np.testing.assert_allclose(Weights.grad, [0.6, 0.8], rtol=1e-6)


def test_like_makes_each_dtype():
    values = np.array([1.5, -2.0])
    for dtype in ("float16", "bfloat16", "float32", "float64", "int64"):
        made = MLX.like(mx.ones(2), dtype, values)
        assert made.dtype == getattr(mx, dtype)
        assert made.astype(mx.float32).tolist() == values.astype("int64" if dtype == "int64" else float).tolist()
    assert ml_dtypes.bfloat16(1.5) == MLX.like(mx.ones(2), "bfloat16", values)[0].item()


def test_frameworks_do_not_mix():
    with pytest.raises(TypeError, match=r"one tree must hold arrays of one framework, got mlx\.core and numpy"):
        gradclip.global_norm([mx.ones(2), np.ones(2)])
    with pytest.raises(TypeError, match=r"argument 0 holds MLX arrays, .* differentiate.*with numpy\.array, then"):
        gradclip.clipped_grad(lambda p, x: mx.sum(p * x), 1.0)(mx.ones(2), mx.ones((3, 2)))
    for batched in (
        lambda x: gradclip.clipped_fun(lambda x: x, 1.0)(x),
        lambda x: gradclip.clipped_fun(lambda x, y: x, 1.0, batch_argnums=(0, 1))(x, np.ones(3)),
        lambda x: gradclip.clipped_grad(lambda p, x: (p * x).sum(), 1.0, batch_argnums=0, argnums=1)(x, torch.ones(2)),
    ):
        with pytest.raises(TypeError, match="argument 0 holds MLX arrays, which gradclip cannot split into examples"):
            batched(mx.ones((3, 2)))
