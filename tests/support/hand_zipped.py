"""Zip archives written by hand, record by record, so that what readers look at can say different things."""

import struct
import zlib
from dataclasses import dataclass, replace

MOST = 0xFFFFFFFF


@dataclass
class Part:
    """A member. Its own header and its entry in the directory are written from it, or from a changed copy."""

    name: bytes
    data: bytes
    method: int = 0
    size: int = -1
    packed: int = -1
    crc: int = -1
    flags: int = 0
    extra: bytes = b""
    attributes: int = 0

    def header(self, **changes):
        """Return the header that lies before the data, with the data."""
        x = replace(self, **changes)
        return b"PK\3\4" + struct.pack("<H", 20) + x._numbers() + x.name + x.extra + x.data

    def entry(self, offset, **changes):
        """Return what the directory says of it."""
        x = replace(self, **changes)
        rest = struct.pack("<3H2L", 0, 0, 0, x.attributes, offset)
        return b"PK\1\2" + struct.pack("<2H", 20, 20) + x._numbers() + rest + x.name + x.extra

    def _numbers(self):
        crc = zlib.crc32(self.data) if self.crc < 0 else self.crc
        packed, size = (len(self.data) if x < 0 else x for x in (self.packed, self.size))
        return struct.pack("<4H3L2H", self.flags, self.method, 0, 0, crc, packed, size, len(self.name), len(self.extra))


def parts_of(members):
    """Return members, given as a dict of names and bytes, or as pairs, or as parts."""
    pairs = members.items() if isinstance(members, dict) else members
    return [x if isinstance(x, Part) else Part(x[0] if isinstance(x[0], bytes) else x[0].encode(), x[1]) for x in pairs]


def body_and_directory(members, start=0):
    """Return the members, and their directory if they start at this place. Some come with a header of their own."""
    body, directory = b"", b""
    for x in members:
        part, header = x if isinstance(x, tuple) else (x, x.header())
        directory += part.entry(start + len(body))
        body += header
    return body, directory


def end(count, size, offset, comment=b""):
    return struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, size, offset, len(comment)) + comment


def end64(count, size, offset):
    return struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, offset)


def locator(offset):
    return struct.pack("<4sLQL", b"PK\6\7", 0, offset, 1)


def archive(*members, hidden=0):
    """Return an archive. The end of its directory does not count the last, hidden members."""
    body, directory = body_and_directory(members)
    return body + directory + end(len(members) - hidden, len(directory), len(body))


def by_offset_and_by_place(first, second):
    """Return an archive with two directories of one size: one where the end says, and one right before the end.

    The first members must be as long as the second ones: offsets count from where the archive seems to start.
    """
    body, directory = body_and_directory(first)
    other, its_directory = body_and_directory(second)
    assert (len(body), len(directory)) == (len(other), len(its_directory))
    return body + directory + other + its_directory + end(len(first), len(directory), len(body))


def by_locator_and_by_place(first, second):
    """Return an archive whose locator points to an end record, and which has another one right before the locator."""
    body, directory = body_and_directory(first)
    other, its_directory = body_and_directory(second, len(body))
    found = body + other + directory
    place = len(found)
    found += end64(len(first), len(directory), place - len(directory)) + its_directory
    found += end64(len(second), len(its_directory), len(found) - len(its_directory))
    return found + locator(place) + end(0xFFFF, MOST, MOST)


def with_end_in_comment(first, second, cut=0):
    """Return an archive whose comment is the end of another one, without its last bytes."""
    body, directory = body_and_directory(first)
    other, its_directory = body_and_directory(second, len(body))
    found = body + other + directory + its_directory
    comment = end(len(second), len(its_directory), len(found) - len(its_directory))
    return found + end(len(first), len(directory), len(body + other), comment[: len(comment) - cut])
