"""The operations that MLX lacks or calls otherwise."""

import math

import mlx.core as mx
import numpy as np
import pytest

from gradclip._src.backends.mlx import namespace

VALUES = [0.5, 1.0, -3.75, 1e-30, 1.7e38]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float64])
def test_fractions_and_exponents(dtype):
    x = mx.array(VALUES, dtype=dtype)
    fractions, exponents = namespace.frexp(x)
    expected = np.frexp(np.array(x))
    assert np.array(fractions).tolist() == expected[0].tolist()
    assert np.array(exponents).tolist() == expected[1].tolist()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float64])
def test_hypotenuses(dtype):
    for x, y in ((3e38, 0.0), (3.0, -4.0), (0.0, 0.0), (math.inf, 1.0), (1.0, -math.inf), (1e-38, 1e-38), (2e38, 2e38)):
        found = namespace.hypot(mx.array(x, dtype=dtype), mx.array(y, dtype=dtype)).item()
        assert found == pytest.approx(math.hypot(x, y), rel=1e-6)
    assert math.isnan(namespace.hypot(mx.array(math.nan), mx.array(1.0)).item())


def test_complex_numbers_keep_what_is_not_finite():
    parts = [mx.array([1.0, math.inf, 2.0]), mx.array([-1.0, 1.0, math.nan])]
    made = namespace.complex_of(*parts)
    assert made.dtype == mx.complex64
    assert str([mx.real(made).tolist(), mx.imag(made).tolist()]) == str([part.tolist() for part in parts])


def test_conversions():
    x = mx.array([1.0, 2.5])
    assert namespace.astype(x, int).dtype == namespace.astype(x, "int64").dtype == mx.int64
    assert namespace.asarray([1.0]).dtype == mx.float32
    assert namespace.asarray(x, mx.float64).dtype == mx.float64
    assert namespace.asarray(x) is x
    assert namespace.asarray(x, copy=True) is not x
    assert namespace.clip(x, max=2.0).tolist() == [1.0, 2.0]
    assert math.isnan(namespace.clip(mx.array(math.nan), -1.0, 1.0).item())
    assert namespace.floor(x).tolist() == [1.0, 2.0]
