import io
import os
from contextlib import ExitStack

import numpy as np
import pytest

from gradclip._src.updates.files import source
from gradclip._src.updates.files.source import PIECE, Source
from gradclip._src.updates.files.stored import FileError


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(256)))
    return path


def test_ranges_share_one_memory_and_report_progress(path):
    done = []
    with Source(path, done.append) as source:
        pieces = [(x.ctypes.data, x.tobytes()) for x in source.ranges(3, 250, 100)]
    assert b"".join(data for _, data in pieces) == bytes(range(3, 253))
    assert len({address for address, _ in pieces}) == 1
    assert done == [100, 100, 50]


def test_two_readers_at_once_do_not_share_memory(path):
    with Source(path) as source:
        for one, other in zip(source.ranges(0, 100, 10), source.ranges(100, 100, 10), strict=True):
            assert (other - one).tolist() == [100] * 10


def test_memory_is_used_again(path):
    with Source(path) as source:
        first = source.memory()
        source.give_back(first)
        assert source.memory() is first
        assert first.size == PIECE
        assert first.ctypes.data % 64 == 0


def test_start_is_short_if_the_file_is(path):
    with Source(path) as source:
        assert source.start(3) == b"\0\1\2"
        assert len(source.start(1000)) == 256


def test_a_file_that_shrinks_while_it_is_read(path):
    with Source(path) as source:
        os.truncate(path, 100)
        with pytest.raises(FileError, match="ends after 100 bytes, but held 256 when it was opened"):
            source.read(0, memoryview(bytearray(256)))


def test_an_error_of_the_disk_is_a_file_error(path, monkeypatch):
    with Source(path) as source:
        source._file.close()
        source._file = FailingFile()
        with pytest.raises(FileError, match="cannot be read: Input/output error"):
            source.bytes_at(0, 1)


class FailingFile(io.BytesIO):
    def seek(self, offset, whence=0):
        raise OSError(5, "Input/output error")


def refusal(path):
    with pytest.raises(FileError) as found:
        Source(path)
    assert "\n" not in str(found.value)
    return str(found.value)


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "/dev/zero"):
        assert "no regular file" in refusal(path)


def test_what_cannot_be_opened(tmp_path, monkeypatch):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "No such file" in refusal(tmp_path / "missing")
    assert "symbolic links" in refusal(tmp_path / "loop")
    assert "too long" in refusal(tmp_path / ("x" * 300))
    assert "null" in refusal(tmp_path / "a\0b")
    assert "\\x1b[31m" in refusal(tmp_path / "a\x1b[31m")

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "mine").touch()
    monkeypatch.setattr(os, "open", denied)
    assert "Permission denied" in refusal(tmp_path / "mine")


def test_pieces_have_whole_elements(path):
    with Source(path) as source:
        assert [x.view(np.uint16).size for x in source.ranges(0, 256, 6)] == [3] * 42 + [2]


def test_few_files_are_open_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "MOST_OPEN", 2)
    for number in range(5):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 10)
    before = len(os.listdir("/proc/self/fd"))
    with ExitStack() as stack:
        opened = [stack.enter_context(Source(tmp_path / str(number))) for number in range(5)]
        for _ in range(2):
            assert [x.bytes_at(3, 2) for x in opened] == [bytes([number, number]) for number in range(5)]
            assert len(os.listdir("/proc/self/fd")) == before + 2
        os.utime(tmp_path / "0", ns=(0, 0))
        with pytest.raises(FileError, match=r"0: it has changed while it was read\. Read it again\."):
            opened[0].bytes_at(0, 1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_is_written_meanwhile_is_refused(path):
    with Source(path) as source:
        pieces = source.ranges(0, 3, 1)
        next(pieces)
        with path.open("r+b") as file:
            file.write(b"x")
        os.utime(path, ns=(0, 1))  # two writes within one tick of the clock would leave one time
        with pytest.raises(FileError, match="it has changed while it was read"):
            next(pieces)
