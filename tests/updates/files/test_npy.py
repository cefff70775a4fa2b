import re
from tokenize import TokenError

import numpy as np
import pytest

from gradclip._src.updates.files import FileError, npy
from stored_files import npy_bytes, values

CODES = [
    "?",
    "i1",
    "u8",
    ">i2",
    "f2",
    ">f2",
    "f4",
    ">f4",
    "f8",
    ">f8",
    "c8",
    ">c16",
    "U3",
    "S2",
    "M8[s]",
    "V4",
    "f4,i4",
]
GOOD = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }"


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("code", CODES)
def test_what_numpy_saves_is_read_as_numpy_reads_it(tmp_path, code, order):
    path = tmp_path / "a"
    random = np.random.default_rng(0)
    for shape in ((), (0, 2), (3,), (2, 3), (4, 1, 3)):
        raw = random.integers(0, 50, (*shape, np.dtype(code).itemsize), dtype=np.uint8)
        array = np.frombuffer(raw.tobytes(), code).reshape(shape).copy(order)
        with path.open("wb") as file:
            np.save(file, array)
        expected = np.load(path)
        ((name, (dtype, found_shape, numbers)),) = values(path).items()
        assert (name, dtype, found_shape) == ("array", expected.dtype.name, expected.shape)
        counts = expected.dtype.kind in "fc"
        assert (numbers is not None) == counts
        if counts:
            np.testing.assert_array_equal(numbers, expected.reshape(-1))


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_all_versions(tmp_path, version):
    (tmp_path / "a").write_bytes(npy_bytes(GOOD + "\n", np.array([3, 4], "<f4").tobytes(), version))
    assert np.load(tmp_path / "a").tolist() == values(tmp_path / "a")["array"][2].tolist() == [3, 4]


def test_what_python_2_wrote(tmp_path):
    (tmp_path / "a").write_bytes(npy_bytes(GOOD.replace("2,", "2L,"), bytes(8)))
    assert values(tmp_path / "a")["array"][1] == (2,)


def test_bytes_behind_the_array_are_another_array_for_numpy(tmp_path):
    (tmp_path / "a").write_bytes(npy_bytes(GOOD, bytes(12)))
    assert np.load(tmp_path / "a").tolist() == values(tmp_path / "a")["array"][2].tolist() == [0, 0]


def changed(old, new, data=bytes(8)):
    assert old in GOOD
    return npy_bytes(GOOD.replace(old, new), data)


REFUSED = {
    "cut off": (npy_bytes(GOOD, bytes(7)), "promises 8 bytes, but the file holds 7"),
    "cut off in the header": (npy_bytes(GOOD)[:30], "but the file ends before"),
    "only the magic": (npy.MAGIC, "version is"),
    "version": (npy_bytes(GOOD, bytes(8), (9, 0)), "version is (9, 0)"),
    "long header": (npy_bytes(GOOD + " " * 10_000, bytes(8)), "at most 10000 are read"),
    "header of 4 GB": (b"\x93NUMPY\x02\x00\xff\xff\xff\xff", "promises 4294967295 bytes"),
    "huge": (changed("(2,)", "(4611686018427387904,)"), "but the file holds 8"),
    "overflow": (changed("(2,)", "(4611686018427387904, 4611686018427387904)"), "the shape (4611686018427387904"),
    "overflow hidden by 0": (changed("(2,)", f"({2**40}, {2**40}, 0)"), "the shape ("),
    "negative": (changed("(2,)", "(-2,)"), "the shape (-2,)"),
    "float": (changed("(2,)", "(2.0,)"), "the shape (2.0,)"),
    "a list": (changed("(2,)", "[2]"), "the shape [2]"),
    "order": (changed("False", "0"), "fortran_order 0"),
    "unknown dtype": (changed("'<f4'", "'<f5'"), "the dtype '<f5'"),
    "dtype of code": (changed("'<f4'", "'__import__(0)'"), "the dtype '__import__(0)'"),
    "key is missing": (changed("'fortran_order': False, ", ""), "must have the keys"),
    "more keys": (changed("{", "{'a': 1, "), "must have the keys"),
    "no dict": (npy_bytes("3", bytes(8)), "must have the keys"),
    "repeated key": (changed("{", "{'shape': (9,), "), "a key more than once"),
    "a call": (npy_bytes("print(3)", bytes(8)), "must have the keys|no Python literal|damaged"),
    "no Python": (npy_bytes("{{{", bytes(8)), "no Python literal"),
    "deep": (npy_bytes("(" * 9000, bytes(8)), "no Python literal"),
    "deep minus": (npy_bytes("-" * 9000 + "1", bytes(8)), "no Python literal|must have"),
    "NUL": (npy_bytes("\0", bytes(8)), "no Python literal|null"),
}


@pytest.mark.parametrize(("data", "why"), REFUSED.values(), ids=REFUSED)
def test_damaged_files_are_refused_as_numpy_refuses_them(tmp_path, data, why):
    path = tmp_path / "a"
    path.write_bytes(data)
    pattern = "|".join(map(re.escape, why.split("|")))
    with pytest.raises(FileError, match=pattern) as found:
        values(path)
    assert str(found.value).isprintable()
    # NumPy takes the last of repeated keys, and 0 for False.
    if "more than once" not in why:
        with pytest.raises((ValueError, EOFError, SyntaxError, TypeError, MemoryError, TokenError)):
            np.load(path)


def test_python_objects_are_refused(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.array([{}, "a"], object), allow_pickle=True)
    with pytest.raises(FileError, match="gradclip reads no pickles: they could run code"):
        values(path)
    with pytest.raises(ValueError, match="allow_pickle"):
        np.load(path)
