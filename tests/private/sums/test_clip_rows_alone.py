"""The norm of an example is its own, to the last bit: of any number of others, and however they lie in memory."""

from functools import cache
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip
from gradclip._src.backends.torch import framework as torch_backend

EXAMPLES = 17
SHAPES = ((7,), (33,), (700,), (5, 13), (40000,))
NUMBERS, OF_LONG_ROWS = (1, 2, 5, 16, 17), (1, 2, 16)


def over_another(x):
    big = np.zeros((x.shape[0], 2 * x.shape[1] + 1, *x.shape[2:]), x.dtype)
    big[:, 1::2] = x
    return big[:, 1::2]


LAYOUTS = {
    "C": np.ascontiguousarray,
    "F": np.asfortranarray,
    "transposed": lambda x: np.ascontiguousarray(np.moveaxis(x, -1, 0)).swapaxes(0, -1) if x.ndim == 2 else x.copy("F"),
    "axes in turn": lambda x: np.moveaxis(np.ascontiguousarray(np.moveaxis(x, -1, 0)), 0, -1),
    "strided": over_another,
    "backwards": lambda x: np.ascontiguousarray(x[::-1])[::-1],
    "every second": lambda x: np.repeat(x, 2, 0)[::2],
}


def clipped(leaves, **options):
    return gradclip.per_example_clip(leaves, 1.0, **options)


def on_another_device(leaves, **options):
    """Through PyTorch's own operations, as on an accelerator."""
    with mock.patch.object(torch_backend, "visible", return_value=False):
        return clipped(leaves, **options)


@cache
def compiled(**options):
    return jax.jit(lambda leaves: clipped(leaves, **options))


PATHS = {
    "numpy": (np.asarray, clipped),
    "torch": (torch.from_numpy, clipped),
    "torch, portable": (torch.from_numpy, on_another_device),
    "jax": (jnp.asarray, clipped),
    "jax, jit": (jnp.asarray, lambda leaves, **options: compiled(**options)(leaves)),
}


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def numbers_of(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(EXAMPLES, *shape)) + (1j * rng.normal(size=(EXAMPLES, *shape)) if "complex" in dtype else 0)
    return x.astype(dtype)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("grid", "dtype"),
    [*((None, dtype) for dtype in ("float64", "complex128", "float32")), (10**9, "float64"), (10**9, "float32")],
)
def test_norms_do_not_depend_on_the_others(path, grid, dtype):
    make, clip = PATHS[path]
    for shape in SHAPES[1:2] if "jit" in path else SHAPES:
        x, b = numbers_of(shape, dtype), numbers_of((3,), "float64", 1)
        expected = np.asarray(clip([make(x), make(b)], grid=grid)[1].norms)
        for layout, lay in LAYOUTS.items():
            y = lay(x)
            assert np.array_equal(y, x)
            if "torch" in path and min(y.strides) < 0:
                continue
            for n in OF_LONG_ROWS if shape == SHAPES[-1] else NUMBERS:
                norms = np.asarray(clip([make(y[:n]), make(b[:n])], grid=grid)[1].norms)
                assert np.array_equal(norms, expected[:n]), (shape, layout, n)
            if path.startswith("jax"):
                break  # JAX has arrays of one layout


@pytest.mark.parametrize("path", ["numpy", "torch"])
@pytest.mark.parametrize("policy", ["drop", "zero"])
def test_norms_do_not_depend_on_how_others_are_computed(path, policy):
    """Squares of 1e-200 and 1e200 leave the range, so that such examples are computed in another way."""
    make, clip = PATHS[path]
    for shape in SHAPES:
        x = numbers_of(shape, "float64")
        plain, _ = clip(make(x), nonfinite=policy)[1].norms, None
        hard = x.copy()
        hard[3], hard[5] = 0.0, hard[5] * 1e-200
        hard[9], hard[11, ..., 0] = hard[9] * 1e200, np.nan
        summed, info = clip(make(hard), nonfinite=policy)
        same = np.delete(np.arange(EXAMPLES), [3, 5, 9, 11])
        assert np.array_equal(np.asarray(info.norms)[same], np.asarray(plain)[same])
        alone = [clip(make(hard[i : i + 1]), nonfinite=policy) for i in range(EXAMPLES)]
        assert np.array_equal(np.asarray(info.norms), [np.asarray(one[1].norms)[0] for one in alone], equal_nan=True)
        np.testing.assert_allclose(summed, sum(np.asarray(one[0]) for one in alone), rtol=1e-12, atol=1e-12)
        mask = np.arange(EXAMPLES) % 2 == 0
        masked, counted = clip(make(hard), nonfinite=policy, mask=mask)
        wanted = sum(np.asarray(one[0]) for one, here in zip(alone, mask, strict=True) if here)
        np.testing.assert_allclose(masked, wanted, rtol=1e-12, atol=1e-12)
        assert int(counted.num_clipped) == sum(
            int(one[1].num_clipped) for one, here in zip(alone, mask, strict=True) if here
        )


@pytest.mark.parametrize("path", PATHS)
def test_on_a_grid_one_example_changes_the_sum_by_its_own_integers(path):
    make, clip = PATHS[path]
    for shape in SHAPES[1:2] if "jit" in path else SHAPES[:4]:
        x = numbers_of(shape, "float64")
        for layout in ("C",) if path.startswith("jax") else ("F", "axes in turn", "strided"):
            y = LAYOUTS[layout](x)
            whole = np.asarray(clip(make(y), grid=10**12)[0])
            for i in (0, 8, 16):
                rest = LAYOUTS[layout](np.delete(y, i, axis=0))
                without, own = (np.asarray(clip(make(z), grid=10**12)[0]) for z in (rest, y[i : i + 1]))
                assert np.array_equal(whole - without, own)
