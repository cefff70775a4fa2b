"""Sums that the kernels compute while they read files, beside the pieces of the same files."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gradclip._src.core.norms import Order
from gradclip._src.updates.files import FileError, difference, open_file, sums
from gradclip._src.updates.files.sums import Asked
from gradclip._src.updates.measured import counts, measured

RANDOM = torch.Generator().manual_seed(0)
LONG = (1 << 20) + 11  # more than a piece
SAVE = {
    "safetensors": lambda tree, path: save_file(tree, path),
    "npz": lambda tree, path: np.savez(path, **{name: x.float().numpy() for name, x in tree.items()}),
    "pt": lambda tree, path: torch.save(tree, path),
    "npy": lambda tree, path: np.save(path, next(iter(tree.values())).float().numpy()),
}
KINDS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


class OnlyPieces:
    """An array of a file without what the kernels read themselves."""

    def __init__(self, array):
        self.name, self.dtype, self.shape, self.pieces = array.name, array.dtype, array.shape, array.pieces


def tree_of(kind, scale=1.0):
    shapes = [(LONG,), (3, 5), (1,), (0,), ()]
    return {f"w{i}": (scale * torch.randn(x, generator=RANDOM)).to(getattr(torch, kind)) for i, x in enumerate(shapes)}


def compared(arrays, order=2.0):
    """Return what is measured, after a look that it is the same by pieces."""
    those = [x for x in arrays if counts(x.dtype)]
    found, by_pieces = (measured(some, Order(order)) for some in (those, list(map(OnlyPieces, those))))
    # Sums by counts of bytes have fewer roundings. All others are the same to the last bit.
    close = {"rtol": 1e-14 if any(x.dtype.startswith("float8") for x in those) else 0, "atol": 0}
    np.testing.assert_allclose([found.value, *found.shares], [by_pieces.value, *by_pieces.shares], **close)
    assert found.elements == by_pieces.elements
    assert (found.nonfinite, found.unreadable) == (by_pieces.nonfinite, by_pieces.unreadable)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", SAVE)
def test_norms_are_those_of_pieces(tmp_path, form, kind):
    path = tmp_path / f"file.{form}"
    SAVE[form](tree_of(kind), path)
    for order in (1.0, 2.0):
        with open_file(path) as file:
            assert all(x.sums(Asked(order, False, 2)) is not None for x in file.arrays)
            compared(file.arrays, order)


@pytest.mark.parametrize("kind", KINDS[:4])
def test_norms_of_differences_are_those_of_pieces(tmp_path, kind):
    for name, scale in (("a", 1.0), ("b", 0.5)):
        save_file(tree_of(kind, scale), tmp_path / name)
    with open_file(tmp_path / "a") as one, open_file(tmp_path / "b") as other:
        both = difference(one, other)
        assert all(x.sums(Asked(2.0, False, 2)) is not None for x in both.arrays)
        compared(both.arrays)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_sums_do_not_settle_is_read_in_pieces(tmp_path, kind):
    tree = tree_of(kind) | {"zeros": torch.zeros(9, dtype=getattr(torch, kind))}
    spoiled = tree_of("float32")["w1"]
    spoiled[1, 1] = spoiled[2, 2] = math.nan
    save_file(tree | {"spoiled": spoiled.to(getattr(torch, kind))}, tmp_path / "file")
    with open_file(tmp_path / "file") as file:
        (said,) = compared(file.arrays).nonfinite
        assert said == "'spoiled' holds 2 NaN and 0 infinite of its 15 numbers"


def test_a_wrong_checksum_is_refused(tmp_path):
    path = tmp_path / "file.npz"
    np.savez(path, w=np.ones(LONG, np.float32))
    changed = bytearray(path.read_bytes())
    changed[LONG] ^= 1
    path.write_bytes(changed)
    with open_file(path) as file:
        (said,) = measured(file.arrays, Order(2.0)).unreadable
        assert "its checksum (CRC-32) is wrong" in said


def test_a_file_that_became_shorter_is_refused(tmp_path):
    path = tmp_path / "file.npy"
    np.save(path, np.ones(LONG, np.float32))
    with open_file(path) as file:
        with path.open("r+b") as other:
            other.truncate(LONG)
        with pytest.raises(FileError, match=r"file\.npy: it cannot be read: it is shorter now"):
            file.arrays[0].sums(Asked(2.0, False, 1))


def test_progress_is_told_of_all_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(sums, "_IN_ONE_CALL", 1)
    path, told = tmp_path / "file", []
    save_file(tree_of("float32"), path)
    with open_file(path, told.append) as file:
        told.clear()
        compared(file.arrays)
        assert sum(told) == 2 * file.size


@pytest.mark.parametrize("off", ["reads_files", "checks_files"])
def test_without_kernels_that_read_there_are_pieces(tmp_path, monkeypatch, off):
    np.savez(tmp_path / "file.npz", w=np.ones(3))
    np.save(tmp_path / "file.npy", np.ones(3))
    monkeypatch.setattr(sums.native, off, lambda: False)
    for name in ("file.npy", "file.npz"):
        with open_file(tmp_path / name) as file:
            found = [x.sums(Asked(2.0, False, 1)) for x in file.arrays]
            assert (found == [None]) == (off == "reads_files" or name == "file.npz")


def test_numbers_in_another_order_are_read_in_pieces(tmp_path):
    np.savez(tmp_path / "file.npz", big=np.ones(3, ">f4"), wide=np.ones(3, np.complex64))
    with open_file(tmp_path / "file.npz") as file:
        assert [x.sums(Asked(2.0, False, 1)) for x in file.arrays] == [None, None]
        compared(file.arrays)
