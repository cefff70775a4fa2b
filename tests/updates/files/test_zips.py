import io
import zipfile
import zlib

import numpy as np
import pytest

from gradclip._src.updates.files import FileError, zips
from gradclip._src.updates.files.source import Source
from stored_files import deflated, member, zip_bytes

DATA = bytes(range(200)) * 3000  # more than one piece


@pytest.fixture
def opened(tmp_path):
    """Return a function that writes bytes, and returns them as a source."""
    sources = []

    def write(data):
        (tmp_path / "zip").write_bytes(data)
        sources.append(Source(tmp_path / "zip"))
        return sources[-1]

    yield write
    for one in sources:
        one.__exit__()


def unpacked(source, most=100_000):
    return {
        x.name: b"".join(piece.tobytes() for piece in zips.MemberBytes(source, x).ranges(most))
        for x in zips.members(source)
    }


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_what_pythons_zipfile_writes(opened, method):
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", method) as archive:
        archive.comment = b"x" * 500
        archive.writestr("é", DATA)
        archive.writestr("empty", b"")
        with archive.open("large", "w", force_zip64=True) as file:
            file.write(DATA)
    assert unpacked(opened(memory.getvalue())) == {"é": DATA, "empty": b"", "large": DATA}


def test_an_archive_without_members(opened):
    assert unpacked(opened(zip_bytes())) == {}


def test_the_first_bytes_can_be_skipped_and_count_for_the_checksum(opened):
    source = opened(zip_bytes(member("a", deflated(DATA), method=8, size=len(DATA), crc=zlib.crc32(DATA))))
    (one,) = zips.members(source)
    assert zips.MemberBytes(source, one).start(5) == DATA[:5]
    found = zips.MemberBytes(source, one, skip=7)
    assert b"".join(x.tobytes() for x in found.ranges(1000)) == DATA[7:]
    assert found.to_read == len(deflated(DATA))


@pytest.mark.parametrize("packed", [False, True])
def test_bytes_are_read_from_any_place_after_the_checksum(opened, packed):
    fields = {"method": 8, "size": len(DATA), "crc": zlib.crc32(DATA)} if packed else {}
    for crc in (zlib.crc32(DATA), 3):
        source = opened(zip_bytes(member("a", deflated(DATA) if packed else DATA, **fields | {"crc": crc})))
        found = zips.MemberBytes(source, *zips.members(source), skip=10)
        memory = bytearray(4)
        if crc == 3:
            with pytest.raises(FileError, match="checksum"):
                found.read(100, memoryview(memory))
        else:
            found.read(100, memoryview(memory))
            assert memory == DATA[110:114]


def test_long_compressed_members_are_not_unpacked_into_memory(opened, monkeypatch):
    monkeypatch.setattr(zips, "_MOST_IN_MEMORY", 10)
    source = opened(zip_bytes(member("a", deflated(DATA), method=8, size=len(DATA), crc=zlib.crc32(DATA))))
    with pytest.raises(FileError, match=r"save it by numpy\.savez, uncompressed"):
        zips.MemberBytes(source, *zips.members(source)).read(0, memoryview(bytearray(1)))


BOMB = deflated(bytes(1 << 24))
REFUSED = {
    "cut off": (zip_bytes(member("a", b"12"))[:-5], "damaged, or cut off"),
    "only a start": (b"PK\x03\x04", "damaged, or cut off"),
    "wrong checksum": (zip_bytes(member("a", b"12", crc=3)), "'a' is damaged: its checksum"),
    "repeated name": (zip_bytes(member("a", b"1"), member("a", b"2")), "the member 'a' more than once"),
    "encrypted": (zip_bytes(member("a", b"1", flags=1)), "'a' is encrypted"),
    "unknown compression": (zip_bytes(member("a", b"1", method=97)), "compression 97"),
    "bzip2": (zip_bytes(member("a", b"1", method=12)), "compression 12"),
    "two sizes": (zip_bytes(member("a", b"12", size=1)), "its two sizes differ"),
    "longer than the file": (zip_bytes(member("a", b"12", size=9999, packed=9999)), "'a' overlaps what lies behind"),
    "outside": (zip_bytes(member("a", b"12", offset=9999)), "'a' lies outside|damaged"),
    "another name": (zip_bytes(member("a", b"12", own_name=b"b")), "has another name in the archive"),
    "the same place": (zip_bytes(member("a", b"12"), member("a", b"12", offset=0)), "overlaps|more than once"),
    "overlap": (zip_bytes(member("a", b"12" * 50, size=150, packed=150), member("b", b"1" * 99)), "'a' overlaps"),
    "fewer bytes": (zip_bytes(member("a", deflated(b"12"), method=8, size=3)), "fewer bytes than promised"),
    "more bytes": (zip_bytes(member("a", deflated(b"12"), method=8, size=1)), "more bytes than promised"),
    "a bomb": (zip_bytes(member("a", BOMB, method=8, size=10)), "more bytes than promised"),
    "bytes behind the end": (zip_bytes(member("a", deflated(b"12") + b"x", method=8, size=2)), "more bytes than"),
    "no deflate": (zip_bytes(member("a", b"\xff" * 9, method=8, size=3)), "does not unpack"),
}


@pytest.mark.parametrize(("data", "why"), REFUSED.values(), ids=REFUSED)
def test_damaged_archives_are_refused(opened, data, why):
    with pytest.raises(FileError, match=why) as found:
        unpacked(opened(data))
    assert str(found.value).isprintable()


def test_a_bomb_is_unpacked_only_as_far_as_promised(opened, monkeypatch):
    source = opened(zip_bytes(member("a", BOMB, method=8, size=10)))
    (one,) = zips.members(source)
    pieces = zips.MemberBytes(source, one).ranges(1 << 19)
    assert next(pieces).size == 10


def test_a_directory_longer_than_gradclip_reads_is_not_read(opened):
    many = zip_bytes(*(member(f"{number:030000}", b"") for number in range(150)))
    with pytest.raises(FileError, match=r"the directory of the zip archive has .* bytes, more than gradclip reads"):
        zips.members(opened(many))


def test_progress_counts_packed_bytes(tmp_path):
    (tmp_path / "zip").write_bytes(zip_bytes(member("a", BOMB, method=8, size=1 << 24, crc=zlib.crc32(bytes(1 << 24)))))
    done = []
    with Source(tmp_path / "zip", done.append) as source:
        (one,) = zips.members(source)
        done.clear()
        assert sum(np.size(x) for x in zips.MemberBytes(source, one).ranges(1 << 19)) == 1 << 24
    assert sum(done) == len(BOMB)
