"""Arrays of every framework in host memory, exactly as they are."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from gradclip._src.backends.on_host import fetched, host_arrays, numbers_of


def no_names():
    return ["w"]


def test_other_dtypes_are_named():
    with pytest.raises(TypeError, match="w has dtype bool, which cannot be clipped"):
        host_arrays([torch.ones(2, dtype=torch.bool)], no_names)
    with pytest.raises(TypeError, match="w has dtype int64, which cannot be clipped"):
        host_arrays([np.array([3, -4])], no_names)
    with pytest.raises(TypeError, match="the tree has dtype bool"):
        host_arrays([np.ones(2, bool)], lambda: [""])


@pytest.mark.parametrize(
    "leaf",
    [
        np.array([[1.5], [-2.0]], ml_dtypes.bfloat16),
        torch.tensor([[1.5], [-2.0]], dtype=torch.bfloat16),
        jnp.array([[1.5], [-2.0]], jnp.bfloat16),
        np.array([1.5, -2.0], ">f4"),
    ],
    ids=["numpy", "torch", "jax", "bytes the other way"],
)
def test_numbers_are_flat_and_wide(leaf):
    (numbers,) = numbers_of(leaf)
    assert (numbers.dtype, numbers.tolist()) == ("float64", [1.5, -2.0])


def test_complex_numbers_are_two_arrays_and_integers_stay():
    assert [part.tolist() for part in numbers_of(np.array([3 + 4j]))] == [[3.0], [4.0]]
    (whole,) = numbers_of(np.array([[2**60 + 1]]))
    assert whole.tolist() == [2**60 + 1]


def test_sparse_arrays_are_not_compared():
    with pytest.raises(TypeError, match=r"arrays to compare must be dense, got .* Call .to_dense\(\) on it"):
        numbers_of(torch.eye(2).to_sparse())


def test_scalars_of_several_frameworks_are_fetched_as_float64():
    values = [torch.tensor(1.5, dtype=torch.bfloat16), 2.0, jnp.array([3.0, 4.0]), np.float32(5.0), 6, torch.ones(0)]
    found = fetched([*values, torch.tensor(7.0), torch.tensor(0.1, dtype=torch.bfloat16)])
    assert [x.tolist() for x in found] == [[1.5], [2.0], [3.0, 4.0], [5.0], [6.0], [], [7.0], [0.10009765625]]
    assert {x.dtype for x in found} == {np.dtype(np.float64)}
    assert fetched([]) == []
