"""Files that hide weights: whoever loads them later gets what was measured, or they were refused."""

import pytest

from gradclip._src.updates.files import FileError
from loaded import (
    by_numpy,
    by_numpy_mapped,
    by_numpy_with_full_names,
    by_safetensors,
    by_safetensors_for_torch,
    by_torch,
    by_torch_mapped,
    by_torch_with_offsets,
    outcome,
    read,
    same,
)
from tricks import ANY, PICKLED
from tricks_of_arrays import NPY, NPZ, SAFETENSORS
from tricks_of_formats import FORMATS
from tricks_of_zips import ZIPPED

CHECKPOINTS = PICKLED | ZIPPED
BY = {
    "safetensors": (by_safetensors, by_safetensors_for_torch),
    "npy": (by_numpy, by_numpy_mapped),
    "npz": (by_numpy, by_numpy_with_full_names),
}
ARRAYS = {
    (kind, name): trick
    for kind, tricks in {"safetensors": SAFETENSORS, "npy": NPY, "npz": NPZ}.items()
    for name, trick in tricks.items()
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.pt"


def check_what_is_loaded(loaded, expected):
    """Check that a file is loaded as its trick wants it: otherwise it would show nothing."""
    if isinstance(expected, type) or isinstance(loaded, Exception):
        assert isinstance(loaded, expected if isinstance(expected, type) else ()), loaded
    elif expected is not ANY:
        assert max((x.largest for x in loaded), default=0.0) == expected


def check_what_is_read(path, loaded, trick):
    """Check that a file is refused in one line that names it, or that each loader gives what was read.

    Where a loader refuses, gradclip may read no numbers at all, which does no harm.
    """
    found = outcome(read, path)
    if isinstance(found, FileError):
        assert str(found).isprintable()
        assert path.name in str(found)
        assert not trick.usual
        return
    assert not isinstance(found, Exception), found
    assert not trick.refused
    empty = not any(x.size for x in found)
    assert all(same(one, found) or (empty and isinstance(one, Exception)) for one in loaded), (loaded, found)


@pytest.mark.every_case
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_what_pytorch_makes_of_a_checkpoint(path, name):
    trick = CHECKPOINTS[name]
    path.write_bytes(trick.data)
    check_what_is_loaded(outcome(by_torch, path), trick.plain)
    check_what_is_loaded(outcome(by_torch_mapped, path), trick.mapped)
    check_what_is_loaded(outcome(by_torch_with_offsets, path), trick.by_offsets)


@pytest.mark.every_case
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_is_refused_or_read_as_pytorch_loads_it(path, name):
    path.write_bytes(CHECKPOINTS[name].data)
    loaded = [outcome(by_torch, path), outcome(by_torch_mapped, path)]
    more = outcome(by_torch_with_offsets, path)  # few load so, and no values are no harm
    check_what_is_read(path, loaded if isinstance(more, Exception) else [*loaded, more], CHECKPOINTS[name])


@pytest.mark.every_case
@pytest.mark.parametrize(("kind", "name"), ARRAYS)
def test_what_safetensors_and_numpy_make_of_a_file(path, kind, name):
    trick = ARRAYS[kind, name]
    path.write_bytes(trick.data)
    for load, expected in zip(BY[kind], (trick.plain, trick.mapped), strict=True):
        check_what_is_loaded(outcome(load, path), expected)


@pytest.mark.every_case
@pytest.mark.parametrize(("kind", "name"), ARRAYS)
def test_a_file_is_refused_or_read_as_safetensors_and_numpy_load_it(path, kind, name):
    path.write_bytes(ARRAYS[kind, name].data)
    check_what_is_read(path, [outcome(load, path) for load in BY[kind]], ARRAYS[kind, name])


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_of_two_formats_is_refused(path, name):
    path.write_bytes(FORMATS[name]())
    loaded = [outcome(load, path) for load in (by_torch, by_numpy, by_safetensors)]
    found = {x.largest for one in loaded if not isinstance(one, Exception) for x in one}
    assert found == {1.0, 1e6}
    with pytest.raises(FileError, match=path.name):
        read(path)
