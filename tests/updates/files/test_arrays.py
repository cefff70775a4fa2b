import numpy as np
import pytest

from gradclip._src.updates.files.arrays import FileArray, PlainBytes
from gradclip._src.updates.files.dtypes import Dtype
from gradclip._src.updates.files.layout import MemoryLayout
from gradclip._src.updates.files.source import PIECE, Source
from gradclip._src.updates.files.stored import FileError
from stored_files import whole


@pytest.fixture
def stored(tmp_path):
    """Return a function that writes an array, and returns it as one in a file."""
    sources = []

    def write(data, name=None, layout=None):
        path = tmp_path / "array"
        path.write_bytes(data.tobytes())
        sources.append(Source(path))
        kind = Dtype.named(name) if name else Dtype.of(data.dtype)
        layout = layout or MemoryLayout.c_order(data.shape)
        return FileArray("w", kind, layout, PlainBytes(sources[-1], 0, data.nbytes))

    yield write
    for one in sources:
        one.__exit__()


@pytest.mark.parametrize("size", [0, 1, PIECE // 4 - 1, PIECE // 4, PIECE // 4 + 1, PIECE // 2])
def test_pieces_cover_the_array(stored, size):
    data = np.arange(size, dtype=np.float32)
    array = stored(data)
    for _ in range(2):
        np.testing.assert_array_equal(whole(array), data)
    assert [x.size for x in array.pieces()] == [PIECE // 4] * (4 * size // PIECE) + [size % (PIECE // 4)] * (
        size % (PIECE // 4) > 0
    )
    assert (array.dtype, array.shape, array.bytes_to_read) == ("float32", (size,), 4 * size)


def test_full_pieces_are_one_object_in_the_same_memory(stored):
    pieces = list(stored(np.zeros(PIECE, np.float16)).pieces())
    assert len({id(x) for x in pieces}) == 1


def test_float8_comes_as_float32_in_pieces_no_longer_than_others(stored):
    data = np.arange(PIECE, dtype=np.uint8)
    found = list(stored(data, "float8_e5m2").pieces())
    assert {x.dtype for x in found} == {"float32"}
    assert {x.data.nbytes for x in found} == {PIECE}
    assert found[0].data[0x3C] == 1


def test_big_endian_pieces_are_native(stored):
    data = np.arange(PIECE // 8 + 5, dtype=">f8")
    array = stored(data)
    np.testing.assert_array_equal(whole(array), data)
    assert all(x.data.dtype.isnative for x in array.pieces())


def test_a_transposed_array_is_read_as_it_lies_or_in_c_order(stored):
    data = np.arange(6, dtype=np.float64)
    array = stored(data, layout=MemoryLayout((3, 2), (1, 3)))
    assert whole(array).tolist() == [0, 1, 2, 3, 4, 5]
    assert whole(array, array.in_c_order).tolist() == [0, 3, 1, 4, 2, 5]


def test_elements_that_lie_apart_are_not_read_with_their_neighbors(stored):
    array = stored(np.arange(6, dtype=np.float64), layout=MemoryLayout((3,), (2,)))
    assert whole(array).tolist() == [0, 2, 4]


def test_integers_are_not_read(stored):
    array = stored(np.arange(3))
    assert array.bytes_to_read == 0
    with pytest.raises(FileError, match="w holds int64, which is not measured"):
        next(array.pieces())
