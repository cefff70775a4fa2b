"""Small files that ask for far more memory or time than they hold are refused, or read in little of both."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import bombs
import in_little_memory

MB = 1 << 20
LONG = {"keys of one hash": 100_000, "a key of pairs of pairs": 60}

pytestmark = pytest.mark.slow


def attempts(loader, folder, files):
    """Return of each file the error that a loader raises, and how much memory it takes.

    A file is given as bytes, or as those before a hole, the hole's length, and those behind it.
    """
    for name, data in files.items():
        write(folder / name, *(data if isinstance(data, tuple) else (data, 0, b"")))
    command = [sys.executable, in_little_memory.__file__, loader, *(str(folder / name) for name in files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in files:
        Path(folder / name).unlink()
    return json.loads(done.stdout)


def write(path, before, hole, behind):
    with path.open("wb") as file:
        file.write(before)
        file.seek(hole, os.SEEK_CUR)
        file.write(behind)


def made(table, size):
    return {name: make(size) for name, make in table.items()}


def made_with_holes(size):
    return {name: (before, size, behind) for name, (before, behind) in made(bombs.HOLES, size).items()}


def errors_of(found):
    return {name: error for name, (error, _) in found.items() if error}


def expected_of(table):
    return {name: error for name, error in bombs.ERRORS.items() if name in table}


def test_pytorch_takes_the_memory_that_a_bomb_asks_for(tmp_path):
    found = attempts("torch", tmp_path, made(bombs.MEMORY, 64 * MB))
    assert errors_of(found) == expected_of(bombs.MEMORY)
    assert [name for name, (_, taken) in found.items() if taken < 32 * MB] == []


def test_a_bomb_takes_little_memory(tmp_path):
    found = attempts("gradclip", tmp_path, made(bombs.MEMORY, 1600 * MB))
    assert {name: x for name, x in found.items() if x[0] not in ("", "FileError") or x[1] > 700 * MB} == {}


def test_a_tensor_of_whatever_is_in_memory_is_refused(tmp_path):
    found = attempts("torch", tmp_path, made(bombs.UNCERTAIN, MB))
    assert {error for error, _ in found.values()} == {""}
    found = attempts("gradclip", tmp_path, made(bombs.UNCERTAIN, 10_000 * MB))
    assert {name: x for name, x in found.items() if x[0] != "FileError" or x[1] > 100 * MB} == {}


def test_a_file_of_50_gb_that_is_a_hole_takes_little_memory(tmp_path):
    found = attempts("torch", tmp_path, made_with_holes(MB))
    assert errors_of(found) == expected_of(bombs.HOLES)
    found = attempts("gradclip", tmp_path, made_with_holes(50_000 * MB))
    assert {name: x for name, x in found.items() if x[0] not in ("", "FileError") or x[1] > 100 * MB} == {}


def test_a_pickle_that_takes_long_is_refused_or_read_soon(tmp_path):
    found = attempts("torch", tmp_path, made(bombs.TIME, 5))
    assert {error for error, _ in found.values()} == {""}
    files = {name: make(LONG.get(name, 1_000_000)) for name, make in bombs.TIME.items()}
    found = attempts("gradclip", tmp_path, files)
    assert {name: x for name, x in found.items() if x[0] not in ("", "FileError") or x[1] > 700 * MB} == {}


def test_arrays_that_unpack_to_more_take_little_memory(tmp_path):
    files = made(bombs.ARRAYS, 16 * MB)
    found = attempts("safetensors", tmp_path, {name: x for name, x in files.items() if "header" in name})
    found |= attempts("numpy", tmp_path, {name: x for name, x in files.items() if "header" not in name})
    assert {error for error, _ in found.values()} == {""}
    found = attempts("gradclip", tmp_path, made(bombs.ARRAYS, 256 * MB))
    assert {name: x for name, x in found.items() if x[0] not in ("", "FileError") or x[1] > 200 * MB} == {}
