from fractions import Fraction

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gradclip._src.updates.files import FileError, difference, open_file
from stored_files import whole

RANDOM = np.random.default_rng(0)


def subtracted(left, right):
    with open_file(left) as one, open_file(right) as other:
        return {x.name: (x.dtype, whole(x)) for x in difference(one, other).arrays if x.left.kind.counts}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("orders", ["CC", "CF", "FC", "FF"])
def test_memory_order_does_not_matter(tmp_path, save, orders):
    arrays = [RANDOM.standard_normal((37, 5, 11)) for _ in orders]
    for name, order, array in zip("ab", orders, arrays, strict=True):
        save(tmp_path / f"{name}.npz", w=np.asarray(array, order=order), n=np.array(3))
    ((dtype, found),) = subtracted(tmp_path / "a.npz", tmp_path / "b.npz").values()
    assert dtype == "float64"
    order = "F" if orders == "FF" else "C"
    np.testing.assert_array_equal(found, (arrays[0] - arrays[1]).ravel(order))


def test_dtypes_of_different_widths_and_pieces_of_different_lengths(tmp_path):
    one = torch.randn(300_001, generator=torch.Generator().manual_seed(0))
    kinds = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
    for kind in kinds:
        save_file({"w": one.to(kind)}, tmp_path / str(kind))
    for kind in kinds:
        ((dtype, found),) = subtracted(tmp_path / "torch.float32", tmp_path / str(kind)).values()
        wide = torch.complex128 if kind is torch.complex64 else torch.float64
        assert f"torch.{dtype}" == str(wide)
        np.testing.assert_array_equal(found, (one.to(wide) - one.to(kind).to(wide)).numpy())


def test_nothing_is_lost_to_the_narrow_format(tmp_path):
    np.save(tmp_path / "a", np.float32([1]))
    np.save(tmp_path / "b", np.float32([2.0**-40]))
    ((_, found),) = subtracted(tmp_path / "a.npy", tmp_path / "b.npy").values()
    assert Fraction(found[0]) == 1 - Fraction(1, 2**40)


def test_a_transposed_tensor_of_a_checkpoint(tmp_path):
    one = torch.arange(6.0).reshape(2, 3)
    torch.save({"w": one.T}, tmp_path / "a")
    torch.save({"w": one.T.contiguous()}, tmp_path / "b")
    assert subtracted(tmp_path / "a", tmp_path / "b")["w"][1].tolist() == [0] * 6


def test_infinity_minus_infinity_is_nan(tmp_path):
    np.save(tmp_path / "a", np.array([np.inf, 1]))
    assert np.isnan(subtracted(tmp_path / "a.npy", tmp_path / "a.npy")["array"][1]).tolist() == [True, False]


@pytest.mark.parametrize(
    ("right", "why"),
    [
        ({"w": np.zeros(2)}, r"b\.npz: it lacks n, which the other file has"),
        ({"w": np.zeros(2), "n": 0, "z": 1}, r"a\.npz: it lacks z, which the other file has"),
        ({"w": np.zeros((1, 2)), "n": 0}, r"'w' has shape \(1, 2\), in the other file \(2,\)"),
        ({"w": np.zeros(2, int), "n": 0}, "'w' is of int64, in the other file of float64"),
    ],
)
def test_files_that_do_not_match(tmp_path, right, why):
    np.savez(tmp_path / "a.npz", w=np.zeros(2), n=np.array(3))
    np.savez(tmp_path / "b.npz", **right)
    with pytest.raises(FileError, match=why):
        subtracted(tmp_path / "a.npz", tmp_path / "b.npz")


def test_size_and_shape_are_of_both(tmp_path):
    np.save(tmp_path / "a", np.zeros((2, 3), np.float32))
    with open_file(tmp_path / "a.npy") as one, open_file(tmp_path / "a.npy") as other:
        found = difference(one, other)
        assert found.size == 48
        assert [(x.name, x.shape) for x in found.arrays] == [("array", (2, 3))]
