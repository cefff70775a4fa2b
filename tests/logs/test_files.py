import gzip

import pytest

from gradclip._src.logs import files
from gradclip._src.logs.rows import LogError


def test_lines_that_are_too_long_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST_LINE", 8)
    path = tmp_path / "a"
    path.write_bytes(b"1234567\n12345678\n" + b"x" * 30 + b"\nshort\nend")
    assert list(files.lines(path)) == ["1234567", "short", "end"]


def test_files_that_are_too_large(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"line\n" * 300)
    monkeypatch.setattr(files, "LARGEST_DOCUMENT", 2**10)
    with pytest.raises(LogError, match="one value of more than 0 MB"):
        files.document(path)
    monkeypatch.undo()
    monkeypatch.setattr(files, "MOST_VALUES", 100)
    path.write_text("[" + ",".join(["{}"] * 60) + "]")
    with pytest.raises(LogError, match="one value of more than 100 values"):
        files.document(path)
    path.write_bytes(b"line\n" * 300)
    monkeypatch.setattr(files, "MOST", 1000)
    with pytest.raises(LogError, match="has more than 0 GB"):
        list(files.lines(path))


def test_compressed_files_are_read_as_far_as_they_are_whole(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"one\n") + gzip.compress(b"two\nthree\n"))
    assert list(files.lines(path)) == ["one", "two", "three"]
    path.write_bytes(path.read_bytes()[:-12])
    assert list(files.lines(path))[:2] == ["one", "two"]


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "a"
    path.write_text("x")
    monkeypatch.setattr(type(path), "open", refused)
    with pytest.raises(LogError, match="a could not be read: Permission denied"):
        files.start_of(path)
