import io
import struct
import zipfile

import pytest

from gradclip._src.updates.files import FileError, zips
from gradclip._src.updates.files.source import Source
from stored_files import deflated, member, zip_bytes

DATA = bytes(range(200)) * 3000


@pytest.fixture
def opened(tmp_path):
    """Return a function that writes bytes, and opens them as an archive."""
    sources = []

    def write(data):
        (tmp_path / "zip").write_bytes(data)
        sources.append(Source(tmp_path / "zip"))
        return zips.opened(sources[-1])

    yield write
    for one in sources:
        one.__exit__()


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("members", [3, 70_000])
def test_what_pythons_zipfile_writes(opened, method, members, monkeypatch):
    monkeypatch.setattr(zips, "_MOST_DIRECTORY", 1 << 24)
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", method) as archive:
        archive.writestr("\u00e9", DATA)
        with archive.open("large", "w", force_zip64=True) as file:
            file.write(DATA)
        for number in range(members - 2):  # from 65,535 on the directory has another form
            archive.writestr(f"{number}", b"")
    found = opened(memory.getvalue())
    assert len(found.infolist()) == members
    assert found.read("\u00e9") == found.read("large") == DATA


def test_an_archive_without_members(opened):
    assert opened(zip_bytes()).namelist() == []


def with_second_directory():
    """Return an archive whose zip64 locator points elsewhere than right before itself."""
    whole = zip_bytes(member("a", b"12"))
    body, end = whole[:-22], whole[-22:]
    end_64 = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, len(body) - 33, 33)
    return body + end_64 + end_64 + struct.pack("<4sLQL", b"PK\x06\x07", 0, len(body), 1) + end


def repeated_field():
    """Return an archive with two zip64 fields in the directory's entry: some readers take the first, some the last."""
    whole = zip_bytes(member("a", b"12"))
    fields = 2 * struct.pack("<2HQ", 1, 8, 0)
    start = whole.index(b"PK\x01\x02")
    entry = bytearray(whole[start:-22])
    struct.pack_into("<H", entry, 30, len(fields))
    struct.pack_into("<L", entry, 42, 0xFFFFFFFF)
    directory = bytes(entry) + fields
    return whole[:start] + directory + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, len(directory), start, 0)


REFUSED = {
    "cut off": (zip_bytes(member("a", b"12"))[:-5], "damaged, or cut off"),
    "only a start": (b"PK\x03\x04", "damaged, or cut off"),
    "bytes before": (b"x" + zip_bytes(member("a", b"12")), "something before or behind"),
    "bytes behind": (zip_bytes(member("a", b"12")) + b"x", "something before or behind|damaged"),
    "another archive before": (zip_bytes(member("a", b"1")) + zip_bytes(member("b", b"2")), r"dcp_to_torch FOLDER"),
    "two directories": (with_second_directory(), "two directories|central directory"),
    "repeated name": (zip_bytes(member("a", b"1"), member("a", b"2")), "the member 'a' more than once"),
    "one field twice": (repeated_field(), "'a' has one field twice"),
    "a folder": (zip_bytes(member("a/", b"")), "is a folder"),
    "a name in an old encoding": (zip_bytes(member("\u00e9", b"1", flags=0)), "its name is in an old encoding"),
    "encrypted": (zip_bytes(member("a", b"1", flags=1)), "'a' is encrypted"),
    "longer than the file": (zip_bytes(member("a", b"12", size=9999, packed=9999)), "'a' overlaps what lies behind"),
}


@pytest.mark.parametrize(("data", "why"), REFUSED.values(), ids=REFUSED)
def test_archives_that_others_could_read_otherwise_are_refused(opened, data, why):
    with pytest.raises(FileError, match=why) as found:
        opened(data)
    assert str(found.value).isprintable()


def test_a_directory_longer_than_gradclip_reads_is_not_read(opened):
    many = zip_bytes(*(member(f"{number:030000}", b"") for number in range(150)))
    with pytest.raises(FileError, match=r"directory of the zip archive has .* bytes. gradclip reads at most 4194304"):
        opened(many)


def test_what_cannot_be_unpacked_is_told(opened):
    found = opened(zip_bytes(member("a", deflated(b"12")[:-1] + b"\xff", method=8, size=2)))
    with pytest.raises(ValueError, match="damaged, or cut off"), zips.told(refuse):
        found.read("a")


def refuse(why):
    raise ValueError(why)
