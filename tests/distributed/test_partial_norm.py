"""Norms of parts that are measured one after the other, and clipped by the norm of all."""

import math
import pickle
from fractions import Fraction

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import gradclip
from gradclip._src.backends.host.backend import HOST
from gradclip._src.core.formats import FLOAT32

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
MAKE = {"NumPy": np.asarray, "PyTorch": torch.tensor, "JAX": jnp.asarray}


def parts_of(seed, spread=8.0):
    rng = np.random.default_rng(seed)
    parts = []
    for _ in range(rng.integers(1, 6)):
        dtype = DTYPES[rng.integers(len(DTYPES))]
        limit = 3.0 if dtype is np.float16 else spread
        scale = 10.0 ** rng.uniform(-limit, limit)
        parts.append({"w": (rng.standard_normal((rng.integers(0, 9), 3)) * scale).astype(dtype)})
    return parts


def exact_square(parts):
    return sum(Fraction(float(x)) ** 2 for part in parts for x in part["w"].astype(np.float64).ravel())


@pytest.mark.parametrize("ord", [1, 2, 3, math.inf, -math.inf])
@pytest.mark.parametrize("seed", range(10))
def test_as_the_norm_of_the_whole(ord, seed):
    parts = [part for part in parts_of(seed) if part["w"].size]
    whole = sum(gradclip.partial_norm(part, ord) for part in parts)
    wide = [{"w": part["w"].astype(np.float64)} for part in parts]
    assert whole.norm == pytest.approx(float(gradclip.global_norm(wide, ord)), rel=1e-13)


@pytest.mark.parametrize("seed", range(50))
def test_the_bound_holds_exactly_and_is_tight(seed):
    parts = parts_of(seed)
    whole = sum(gradclip.partial_norm(part) for part in parts)
    max_norm = whole.norm * float(np.random.default_rng(seed).uniform(0.1, 1.5))
    clipped = [whole.clip(part, max_norm) for part in parts]
    square = exact_square(clipped)
    assert square <= Fraction(max_norm) ** 2
    assert square >= Fraction(min(whole.norm, max_norm) * 0.99) ** 2
    for part, result in zip(parts, clipped, strict=True):
        assert result["w"].dtype == part["w"].dtype
        if whole.norm < max_norm * (1 - 1e-9):
            assert result["w"].tobytes() == part["w"].tobytes()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_half_part_beside_float64_is_measured_as_precisely(dtype):
    rng = np.random.default_rng(0)
    parts = [{"w": rng.uniform(-900, 900, 400).astype(dtype)}, {"w": rng.standard_normal(3)}]
    norm = sum(gradclip.partial_norm(part) for part in parts).norm
    assert norm == pytest.approx(math.sqrt(exact_square(parts)), rel=1e-14)


@pytest.mark.parametrize("framework", MAKE)
def test_frameworks(framework):
    make = MAKE[framework]
    parts = [{"w": make(np.float32([3.0, 0.0]))}, {"b": make(np.float32([4.0]))}, {}]
    whole = sum(gradclip.partial_norm(part) for part in parts)
    assert whole.norm == 5.0
    clipped = [whole.clip(part, 2.5) for part in parts]
    np.testing.assert_allclose(np.asarray(clipped[0]["w"]), [1.5, 0.0], rtol=1e-6)
    np.testing.assert_allclose(np.asarray(clipped[1]["b"]), [2.0], rtol=1e-6)
    assert clipped[2] == {}


def test_the_order_of_the_parts_does_not_matter_and_they_travel():
    parts = [gradclip.partial_norm(np.array([10.0**k])) for k in (-200, 0, 3, 200)]
    norms = {sum(pickle.loads(pickle.dumps(order))).norm for order in (parts, parts[::-1])}
    assert norms == {1e200}


def test_squares_beyond_the_range():
    large = [gradclip.partial_norm(np.array([3e200])), gradclip.partial_norm(np.array([4e200]))]
    assert sum(large).norm == pytest.approx(5e200, rel=1e-14)
    np.testing.assert_allclose(sum(large).clip(np.array([3e200]), 5.0), [3.0], rtol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_part_that_is_not_finite(bad):
    good = np.array([3.0, 4.0])
    whole = gradclip.partial_norm(good) + gradclip.partial_norm(np.array([bad]))
    assert not math.isfinite(whole.norm)
    assert np.isnan(whole.clip(good, 1.0)).all()
    assert whole.clip(good, 1.0, nonfinite="drop").tolist() == [0.0, 0.0]
    with pytest.raises(FloatingPointError, match="one of the parts holds NaN or infinity"):
        whole.clip(good, 1.0, nonfinite="raise")
    with pytest.raises(ValueError, match=r"does not work here.*before you call partial_norm"):
        whole.clip(good, 1.0, nonfinite="zero")


def test_what_a_device_reads_as_zero_counts_in(monkeypatch):
    parts = [np.array([3.0, 0.0]), np.array([4.0])]
    with monkeypatch.context() as patched:
        patched.setattr(type(HOST), "flushed_below", lambda *_: 0.5)
        whole = sum(gradclip.partial_norm(part) for part in parts)
    assert (whole.norm, whole.floor) == (5.0, 1.5)
    clipped = np.concatenate([whole.clip(part, 1.0) for part in parts])
    np.testing.assert_allclose(clipped, np.array([3.0, 0.0, 4.0]) / 6.5, rtol=1e-12)


def test_devices_without_64_bits_are_refused(monkeypatch):
    monkeypatch.setattr(HOST, "wide", FLOAT32)
    with pytest.raises(ValueError, match="need a device that computes in 64 bits"):
        gradclip.partial_norm(np.ones(2))


def test_what_cannot_be_added():
    with pytest.raises(ValueError, match=r"orders 1.0 and 2.0 cannot be added"):
        gradclip.partial_norm(np.ones(2), 1) + gradclip.partial_norm(np.ones(2))
    with pytest.raises(TypeError):
        gradclip.partial_norm(np.ones(2)) + 1
    with pytest.raises(ValueError, match="at most 8, inf or -inf"):
        gradclip.partial_norm(np.ones(2), 9)
