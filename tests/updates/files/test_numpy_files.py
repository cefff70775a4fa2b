import io
import zlib

import numpy as np
import pytest

from gradclip._src.updates.files import FileError
from stored_files import deflated, member, npy_bytes, values, zip_bytes

GOOD = npy_bytes("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }", bytes(8))
WHOLE = npy_bytes("{'descr': '<i4', 'fortran_order': False, 'shape': (2,), }", bytes(8))
CODES = ["?", "i1", ">u4", "f2", "f4", ">f4", "f8", "c8", "c16", "U3"]


def pickled():
    file = io.BytesIO()
    np.save(file, np.array([{}], object), allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("seed", range(10))
def test_what_numpy_saves_is_read_as_numpy_reads_it(tmp_path, save, seed):
    random = np.random.default_rng(seed)
    tree = {}
    for number in range(random.integers(0, 6)):
        shape = tuple(random.integers(0, 5, random.integers(0, 4)))
        array = (random.standard_normal(shape) * 9).astype(random.choice(CODES), order=random.choice(["C", "F"]))
        tree[f"layer{number}/é.w"] = array
    save(tmp_path / "a.npz", **tree)
    found = values(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as expected:
        assert list(found) == list(expected)
        for name, (dtype, shape, numbers) in found.items():
            assert (dtype, shape) == (expected[name].dtype.name, expected[name].shape)
            assert (numbers is not None) == (expected[name].dtype.kind in "fc")
            if numbers is not None:
                np.testing.assert_array_equal(numbers, expected[name].reshape(-1))


BOMB = deflated(bytes(1 << 24))
REFUSED = {
    "a bomb": (zip_bytes(member("a.npy", BOMB, method=8, size=10)), "damaged, or cut off|is no array"),
    "unpacks to fewer": (
        zip_bytes(member("a.npy", deflated(GOOD[:-1]), method=8, size=len(GOOD), crc=zlib.crc32(GOOD[:-1]))),
        "unpacks to fewer bytes than promised",
    ),
    "no deflate": (zip_bytes(member("a.npy", b"\xff" * 9, method=8, size=3)), "damaged, or cut off"),
    "unknown compression": (zip_bytes(member("a.npy", GOOD, method=97)), "compression method is not supported"),
    "another name inside": (zip_bytes(member("a.npy", GOOD, own_name=b"b.npy")), "differ"),
    "a name with and without .npy": (zip_bytes(member("a.npy", GOOD), member("a.npy.npy", GOOD)), "two arrays named"),
    "a model of Keras": (zip_bytes(member("config.json", b"{}")), r"numpy\.savez\(path, \*model\.get_weights\(\)\)"),
    "no array": (zip_bytes(member("readme.txt", b"hello")), "the member 'readme.txt' is no array"),
    "pickles": (zip_bytes(member("a.npy", pickled())), "'a.npy': it holds Python objects"),
    "more than promised": (zip_bytes(member("a.npy", GOOD + b"x")), "promises 8 bytes, but the archive holds 9"),
    "less than promised": (zip_bytes(member("a.npy", GOOD[:-1])), "promises 8 bytes, but the archive holds 7"),
    "one name for two": (zip_bytes(member("a", GOOD), member("a.npy", GOOD)), "two arrays named 'a'"),
    "bad header": (zip_bytes(member("a.npy", npy_bytes("3"))), "'a.npy': Header is not a dictionary"),
    "damaged numbers": (zip_bytes(member("a.npy", GOOD, crc=7)), "Bad CRC-32 for file 'a.npy'"),
    "damaged integers": (zip_bytes(member("a.npy", WHOLE, crc=7)), "Bad CRC-32 for file 'a.npy'"),
    "escapes": (zip_bytes(member("\x1b[31m\n", b"hello")), r"'\\x1b\[31m\\n' is no array"),
}


@pytest.mark.parametrize(("data", "why"), REFUSED.values(), ids=REFUSED)
def test_damaged_archives_are_refused(tmp_path, data, why):
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(FileError, match=why) as found:
        values(tmp_path / "a")
    assert str(found.value).isprintable()


def header(descr, shape):
    return f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (header("<f4", "(3,)"), "promises 12 bytes, but the file holds 8"),
        (header("<f4", "(-1,)"), "shape"),
        (header("<f4", "(True,)"), "shape"),
        (header("(2,)<f4", "(1,)"), "dtype"),
        (header("|O", "(1,)"), "it holds Python objects"),
        ("[" * 5000, r"a\.npy: "),
    ],
)
def test_damaged_arrays_are_refused(tmp_path, text, why):
    (tmp_path / "a.npy").write_bytes(npy_bytes(text, bytes(8)))
    with pytest.raises(FileError, match=why) as found:
        values(tmp_path / "a.npy")
    assert str(found.value).isprintable()


def test_an_array_with_named_fields_is_refused_by_its_version(tmp_path):
    (tmp_path / "a.npy").write_bytes(npy_bytes(header("<f4", "()"), bytes(4), (3, 0)))
    with pytest.raises(FileError, match=r"its \.npy version \(3, 0\) is for arrays with named fields"):
        values(tmp_path / "a.npy")
