"""What the policies for NaN and infinities take beside the gradients: nothing that grows with them."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import torch

import gradclip

SIZE = 2_000_000
FEW = 1_500_000  # bytes


def numpy_gradient(dtype):
    return np.ones(SIZE, dtype)


def strided_gradient(dtype):
    return np.ones((2000, 2 * SIZE // 2000), dtype)[:, ::2]


def tensor(dtype):
    array = np.ones(SIZE, dtype)
    if dtype is ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def strided_tensor(dtype):
    return tensor(dtype).reshape(2000, -1)[:, ::2]


DTYPES = (np.float16, np.float32, np.float64, ml_dtypes.bfloat16, np.complex64)
KINDS = (numpy_gradient, strided_gradient, tensor, strided_tensor)
every_kind = pytest.mark.parametrize("kind", KINDS)


def clip_in_place(gradient, max_norm, nonfinite):
    if isinstance(gradient, torch.Tensor):
        parameter = torch.nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
        parameter.grad = gradient
        gradient = [parameter]
    return gradclip.clip_grad_norm_(gradient, max_norm, nonfinite=nonfinite)


def peak(function):
    tracemalloc.start()
    try:
        return function(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def flat(gradient):
    array = gradient.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if is_bfloat16(gradient) else gradient
    return np.asarray(array).reshape(-1)


def is_bfloat16(gradient):
    return isinstance(gradient, torch.Tensor) and gradient.dtype is torch.bfloat16


def spoil(gradient):
    row = gradient.reshape(-1) if gradient.shape == (SIZE,) else gradient[-1]
    row[5], row[7] = float("nan"), float("-inf")


@every_kind
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_in_place(kind, dtype):
    gradient = kind(dtype)
    spoil(gradient)
    norm = (flat(gradient).size - 2) ** 0.5
    found, used = peak(lambda: clip_in_place(gradient, 100.0, "zero"))
    assert used < FEW
    assert float(found) == pytest.approx(norm, rel=1e-6)
    values = flat(gradient)
    zeros = np.flatnonzero(values == 0)
    assert len(zeros) == 2
    assert zeros[1] - zeros[0] == 2
    assert np.unique(values).size == 2
    assert float(abs(values).max()) == pytest.approx(100.0 / norm, rel=1e-2)


@every_kind
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_below_the_threshold_changes_nothing_else(kind, dtype):
    gradient = kind(dtype)
    spoil(gradient)
    _, used = peak(lambda: clip_in_place(gradient, 1e5, "zero"))
    assert used < FEW
    values = flat(gradient)
    assert (np.count_nonzero(values == 0), np.count_nonzero(values == 1)) == (2, len(values) - 2)


@every_kind
@pytest.mark.parametrize("dtype", DTYPES)
def test_raise_counts_by_pieces(kind, dtype):
    gradient = kind(dtype)
    spoil(gradient)
    before = flat(gradient).tobytes()

    def refused():
        with pytest.raises(FloatingPointError, match="1 NaN, 1 infinite of"):
            clip_in_place(gradient, 1.0, "raise")

    _, used = peak(refused)
    assert used < FEW
    assert flat(gradient).tobytes() == before


@every_kind
def test_a_functional_zero_takes_its_result_alone(kind):
    gradient = kind(np.float32)
    spoil(gradient)
    (clipped, _), used = peak(lambda: gradclip.clip_by_global_norm(gradient, 100.0, nonfinite="zero"))
    assert used < gradient.nbytes + FEW
    assert np.isnan(flat(gradient)).sum() == 1
    assert np.count_nonzero(flat(clipped) == 0) == 2


def test_of_a_complex_number_both_parts_become_zero():
    for nan in (complex(np.nan, 1), complex(1, np.inf), complex(np.nan, -np.inf)):
        gradient = np.array([3 + 4j, nan, 12j])
        assert float(gradclip.clip_grad_norm_(gradient, 100.0, nonfinite="zero")) == 13.0
        assert gradient.tolist() == [3 + 4j, 0, 12j]


def test_a_complex_number_whose_magnitude_overflows_is_finite():
    gradient = np.array([1.5e308 + 1.5e308j, np.nan])
    with pytest.raises(FloatingPointError, match="1 NaN, 0 infinite of 2"):
        gradclip.clip_grad_norm_(gradient, 1.0, nonfinite="raise")


def test_examples_that_hold_what_is_not_finite_count_as_far_as_they_are():
    grads = np.array([[3.0, np.nan, 4.0], [np.inf, 0.0, 2.0]])
    summed, info = gradclip.per_example_clip({"g": grads}, 100.0, nonfinite="zero")
    assert summed["g"].tolist() == [3.0, 0.0, 6.0]
    assert np.asarray(info.norms).tolist() == [5.0, 2.0]
