import itertools
import math
import os
import pickle
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import loaded
from gradclip._src.updates.files import FileError, open_file
from stored_files import member, npy_bytes, safetensors_bytes, values, zip_bytes
from updates.files import fuzz

NUMBERS = np.arange(3, dtype=np.float32)
GIB = 1 << 30
# Prints the most resident memory in kB, beyond that of PyTorch if that is imported first. The `ru_maxrss` of a child is
# at least that of its parent.
PEAK = "print(int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) - before)"
READ = f"""
import sys
from pathlib import Path
from gradclip._src.updates.files import FileError, open_file
elements, last = 0, None
if sys.argv[2:]:
    import torch
before = int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) if sys.argv[2:] else 0
try:
    with open_file(Path(sys.argv[1])) as file:
        for array in file.arrays:
            for piece in array.pieces() if array.bytes_to_read else ():
                elements += piece.size
                last = piece.data[-1]
    print(elements, last)
except FileError as error:
    print(error, file=sys.stderr)
{PEAK}
"""


@pytest.fixture
def written(tmp_path):
    """Every format, under names that say something else."""
    save_file({"array": NUMBERS}, tmp_path / "a.npz")
    with (tmp_path / "b.txt").open("wb") as file:
        np.save(file, NUMBERS)
    with (tmp_path / "c.safetensors").open("wb") as file:
        np.savez(file, array=NUMBERS)
    torch.save({"array": torch.from_numpy(NUMBERS)}, tmp_path / "d.npy")
    (tmp_path / "e.bin").write_text('  {"weight_map": {"array": "a.npz"}}')
    return sorted(tmp_path.iterdir())


def test_the_format_follows_from_what_is_in_the_file(written):
    assert len(written) == 5
    for path in written:
        assert values(path)["array"][2].tolist() == [0, 1, 2]


def test_a_header_whose_length_looks_like_json(tmp_path):
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    text = safetensors_bytes({"w": entry})[8:]
    (tmp_path / "a").write_bytes(safetensors_bytes(text.ljust(ord("{"))))
    assert list(values(tmp_path / "a")) == ["w"]


def test_progress_adds_up_to_the_size(written):
    for path in written:
        done = []
        with open_file(path, done.append) as file:
            assert done == []
            assert file.path == path
            for array in file.arrays:
                for _ in array.pieces():
                    pass
            assert sum(done) == file.size > 0


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it is empty"),
        (b"hello", "its format is unknown"),
        (b"\x80\x04K\x01.", "it is a pickle, which could run code"),
        (b"\x89HDF\r\n\x1a\n", "it is an HDF5 file"),
        (b"GGUF", "it is a GGUF file"),
        (b"\x1f\x8b\x08", "it is compressed by gzip"),
        (pickle.dumps({"a": 1}), "it is a pickle"),
        (b"\x28\xb5\x2f\xfd", "Zstandard"),
        (b"\x81\xa1w", "MessagePack"),
        (b"{", "damaged"),
    ],
)
def test_other_files_are_refused(tmp_path, data, why):
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(FileError, match=why):
        values(tmp_path / "a")


@pytest.mark.parametrize(
    ("name", "why"),
    [(".metadata", "dcp_to_torch FOLDER"), ("_CHECKPOINT_METADATA", "Orbax"), ("saved_model.pb", "SavedModel")],
)
def test_folders_of_other_libraries_are_told(tmp_path, name, why):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(FileError, match=why):
        values(tmp_path)
    with pytest.raises(FileError, match="cannot be opened"):
        values(tmp_path / ("a" * 300))


def test_no_memory_is_an_error_of_the_file(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(npy_bytes(""))

    def no_memory(*_):
        raise MemoryError

    monkeypatch.setattr("gradclip._src.updates.files.numpy_files.header_of", no_memory)
    with pytest.raises(FileError, match="takes more memory than there is"):
        values(tmp_path / "a")


def read_elsewhere(path, *packages):
    """Return what a new process prints that reads a file."""
    command = [sys.executable, "-c", READ, str(path), *packages]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_only_the_library_of_a_format_is_imported(written):
    code = "import sys; from pathlib import Path; from gradclip._src.updates.files import open_file\n"
    code += "with open_file(Path(sys.argv[1])):\n"
    code += " print(sorted({'jax', 'torch', 'tensorflow', 'safetensors'} & set(sys.modules)))"
    libraries = {"a.npz": ["safetensors"], "d.npy": ["torch"], "e.bin": ["safetensors"]}
    for path in written:
        command = [sys.executable, "-c", code, str(path)]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert found == f"{libraries.get(path.name, [])}\n"


@pytest.mark.parametrize(("name", "package"), [("d.npy", "torch"), ("a.npz", "safetensors")])
def test_a_missing_library_is_told(written, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(FileError, match=f"{name}: to read it needs {package}. To install it: pip install {package}"):
        values(written[0].with_name(name))


def sparse(path, head, size, tail=b""):
    """Write a file with a hole of `size` bytes, less the last 4, which are the float32 1."""
    with path.open("wb") as file:
        file.write(head)
        file.seek(size - 4, os.SEEK_CUR)
        file.write(np.float32(1).tobytes() + tail)
    return path


def checksum(head, size):
    """Return the checksum of what `sparse` writes."""
    found, zeros = zlib.crc32(head), bytes(1 << 20)
    for _ in range((size - 4) >> 20):
        found = zlib.crc32(zeros, found)
    return zlib.crc32(np.float32(1).tobytes(), zlib.crc32(bytes((size - 4) % (1 << 20)), found))


def archive(path, before, name, head, size):
    """Write an archive whose last member has a hole of `size` bytes."""
    crc = checksum(head, size)
    fields = {"crc": crc, "packed": len(head) + size, "size": len(head) + size}
    whole = zip_bytes(*before, member(name, head, **fields))
    start = whole.index(b"PK\x01\x02")
    end = bytearray(whole[start:])
    struct.pack_into("<L", end, len(end) - 6, start + size)
    return sparse(path, whole[:start], size, bytes(end))


def write_large(path, kind, size):
    """Write a file of some GiB that takes no room on the disk. Return how many elements it has."""
    npy = npy_bytes(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({size // 4},), }}")
    if kind == "npy":
        sparse(path, npy, size)
    if kind == "safetensors":
        entry = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
        sparse(path, safetensors_bytes({"w": entry}), size)
    if kind == "npz":
        archive(path, [], "w.npy", npy, size)
    if kind == "checkpoint":
        shape = struct.pack("<i", size // 4)
        pickled = (
            b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\n"
            b"X\x01\0\0\x000X\x03\0\0\0cpuJ" + shape + b"tQK\0J" + shape + b"\x85K\x01\x85\x89NtR."
        )
        archive(path, [member("a/data.pkl", pickled), member("a/version", b"3")], "a/data/0", b"", size)
    return size // 4


# The larger has more bytes than 32 bits count; those of an archive are fewer, as longer ones have another form.
@pytest.mark.parametrize("size", [GIB // 4, pytest.param(4 * GIB + (1 << 20), marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["safetensors", "npy", "npz", "checkpoint"])
def test_files_of_any_size_take_less_than_200_mb_of_memory(tmp_path, kind, size):
    if size > 4 * GIB and kind in ("npz", "checkpoint"):
        size = 2 * GIB + (1 << 20)
    elements = write_large(tmp_path / "large", kind, size)
    numbers, kibibytes = read_elsewhere(tmp_path / "large", *["torch"] * (kind == "checkpoint")).splitlines()
    (tmp_path / "large").unlink()
    assert numbers == f"{elements} 1.0"
    assert int(kibibytes) * 1024 < 100e6


@pytest.mark.parametrize("kind", ["safetensors", "npz", "npy", "pickle"])
def test_hostile_headers_take_less_than_200_mb_of_memory(tmp_path, kind):
    # What takes the most memory for each byte that a header may have.
    entries = [f'"{i}":{{"dtype":"U8","shape":[],"data_offsets":[{i},{i + 1}]}}' for i in range(99_999)]
    numbers = npy_bytes("{'descr': '|u1', 'fortran_order': False, 'shape': (), }", b"x")
    data = {
        "safetensors": lambda: safetensors_bytes(f"{{{','.join(entries)}}}".encode(), bytes(99_999)),
        "npz": lambda: zip_bytes(*(member(f"{i}", numbers) for i in range(2_000))),
        "npy": lambda: npy_bytes("[" + "{}," * 3_000 + "]"),
        "pickle": lambda: zip_bytes(member("a/data.pkl", b"\x80\x02" + b"}" * 1_499_000 + b".")),
    }[kind]()
    (tmp_path / "a").write_bytes(data)
    assert int(read_elsewhere(tmp_path / "a", *["torch"] * (kind == "pickle")).splitlines()[-1]) * 1024 < 200e6


def test_damaged_files_give_a_norm_or_a_file_error(tmp_path):
    counts, wrong = fuzz.outcomes(range(400), tmp_path)
    assert wrong == []
    assert {name for name, _ in counts} == set(fuzz.files())
    refused = {"norm, refused by who loads it"}  # few, if any
    assert {outcome for _, outcome in counts} - refused == {"norm", "norm, not finite", "FileError"}


def test_the_fuzzer_sees_a_crash(tmp_path, monkeypatch):
    def crash(*_):
        raise IndexError("a bug")

    monkeypatch.setattr(fuzz, "norm", crash)
    _, wrong = fuzz.outcomes(range(3), tmp_path)
    assert [(case, error) for case, _, _, error in wrong] == [(n, "IndexError('a bug')") for n in range(3)]


def test_the_fuzzer_sees_other_numbers_and_who_refuses_them(tmp_path, monkeypatch):
    monkeypatch.setattr(loaded, "by_safetensors_for_torch", lambda _: [np.ones(3)])
    monkeypatch.setattr(loaded, "by_numpy", lambda _: open_file(None))
    counts, wrong = fuzz.outcomes(range(100), tmp_path)
    read = {name for name, outcome in counts if outcome.startswith("norm")}
    assert {(name, error) for _, name, _, error in wrong} == {("safetensors", "other numbers")}
    assert read == set(fuzz.files())
    assert counts["npy", "norm, refused by who loads it"] > 0
    assert counts["npy", "norm"] == 0


def test_the_fuzzer_repeats_itself_and_damages_every_format_in_every_way(tmp_path):
    valid = fuzz.files()
    for name, data in valid.items():
        (tmp_path / name).write_bytes(data)
        assert math.isfinite(fuzz.norm(tmp_path / name, Path(tmp_path / name)))
    cases = [fuzz.damaged(case, valid) for case in range(600)]
    assert cases == [fuzz.damaged(case, valid) for case in range(600)]
    ways = itertools.product(valid, (way.__name__ for way in fuzz.WAYS))
    assert {(name, way) for name, way, _ in cases} == set(ways)
