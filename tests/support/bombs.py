"""Small files that ask whoever loads them for far more memory or time than they hold, as functions of how much."""

import struct
import zlib
from functools import cache
from itertools import islice, product

import hand_zipped
from hand_pickled import SMALL, call, dtype, get, long, members_of, named, put, tensor
from hand_zipped import MOST, Part, parts_of
from stored_files import safetensors_bytes
from tricks import COUNTER, ORDERED, SET, SIZE, TENSOR, TO_DTYPE, filled, held
from tricks_of_arrays import entry, npy, npz

ENCODE, BYTES = named("_codecs", "encode"), named("__builtin__", "bytearray")
PART = 1 << 20
LONGEST_HEADER = 90_000_000


@cache
def block(byte):
    """Return a compressed block of equal bytes, which can be repeated."""
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(byte * PART) + packer.flush(zlib.Z_FULL_FLUSH)


@cache
def checksum(byte, blocks, start):
    found = zlib.crc32(start)
    for _ in range(blocks):
        found = zlib.crc32(byte * PART, found)
    return found


def packed(name, size, byte=b"\0", start=b""):
    """Return a compressed member: a start, and then equal bytes."""
    packer, blocks = zlib.compressobj(wbits=-15), size // PART
    data = packer.compress(start) + packer.flush(zlib.Z_FULL_FLUSH) + block(byte) * blocks + b"\3\0"
    return Part(name, data, 8, len(start) + blocks * PART, crc=checksum(byte, blocks, start))


def with_part(part, value=SMALL):
    """Return a checkpoint with another member in place of one, or with one more."""
    parts = [x for x in parts_of(members_of({"w": value})) if x.name != part.name]
    return hand_zipped.archive(*parts, part)


def again(make, value, size, each, *more):
    """Return a checkpoint with as many calls for one value as take up the size, each of so many bytes."""
    return held([put(0, value), [call(make, get(0), *more) for _ in range(size // each)]])


def by_many_names(size):
    """Return a checkpoint whose only storage, of 1 MB, is loaded once more for each way to write its name."""
    ways = ("".join(way) for way in product(*zip("abcdefghijkl", "ABCDEFGHIJKL", strict=True)))
    found = [tensor(name, (1,), elements=PART // 4) for name in islice(ways, size // PART)]
    return hand_zipped.archive(*parts_of(members_of({"w": found}, data__abcdefghijkl=bytes(PART))))


def keys_of_one_hash(count):
    """Return a checkpoint with a dict whose keys are found one after the other."""
    return held(b"}(" + b"".join(long((2**61 - 1) * n) + b"N" for n in range(1, count)) + b"u")


def in_a_tuple(depth):
    """Return a checkpoint whose key is a tuple in a tuple in a tuple."""
    return held(filled({}, b")" + b"\x85" * depth, 1))


def pairs(depth):
    """Push a tuple of one tuple two times, which has one tuple two times, and so on."""
    return put(0, pairs(depth - 1)) + get(0) + b"\x86" if depth else b")"


def many_names(size):
    """Return safetensors with as many names as fill the longest header."""
    empty = entry(shape="[0]", size=0)
    each = f',"{0:07}":{empty}'
    names = "".join(f',"{number:07}":{empty}' for number in range(min(size, LONGEST_HEADER) // len(each)))
    return safetensors_bytes(f'{{"":{empty}{names}}}'.encode())


MEMORY = {
    "bytes": lambda size: held(call(BYTES, size)),
    "bytes again and again": lambda size: held([call(BYTES, PART) for _ in range(size // PART)]),
    "an expanded tensor that becomes another": lambda size: held(
        call(TO_DTYPE, tensor("0", (size // 8,), (0,)), dtype("float64"), "cpu", False)
    ),
    "a text that is encoded again and again": lambda size: again(ENCODE, "x" * PART, size, 4 * PART, "utf-32"),
    "bytes that are copied again and again": lambda size: again(BYTES, call(BYTES, PART), size, PART),
    "a list that becomes sets": lambda size: again(SET, list(range(50_000)), size, 2 * PART),
    "a list that becomes sizes": lambda size: again(SIZE, [1] * 50_000, size, 400_000),
    "a dict that is copied": lambda size: again(ORDERED, dict.fromkeys(range(5000)), size, 600_000),
    "a dict that is counted": lambda size: again(COUNTER, dict.fromkeys(range(50_000), 1), size, 2 * PART),
    "lists in a pickle": lambda size: with_part(packed(b"a/data.pkl", size // 64, b"]", b"\x80\x02")),
    "marks in a pickle": lambda size: with_part(packed(b"a/data.pkl", size // 64, b"(", b"\x80\x02")),
    "a compressed pickle": lambda size: with_part(packed(b"a/data.pkl", size)),
    "a compressed byte order": lambda size: with_part(packed(b"a/byteorder", size)),
    "a compressed version": lambda size: with_part(packed(b"a/version", size)),
    "a compressed format": lambda size: with_part(packed(b"a/.format_version", size)),
    "a compressed id": lambda size: with_part(packed(b"a/.data/serialization_id", size)),
    "a compressed storage": lambda size: with_part(packed(b"a/data/2", size), tensor("2", (1,), elements=size // 4)),
    "a storage by many names": by_many_names,
}
# What PyTorch makes of them where it does not load them.
ERRORS = {
    "lists in a pickle": "EOFError",
    "marks in a pickle": "EOFError",
    "a compressed pickle": "UnpicklingError",
    "a compressed byte order": "ValueError",
    "a compressed version": "RuntimeError",
}
UNCERTAIN = {
    "a tensor of nothing": lambda size: held(call(TENSOR, size)),
    "a typed tensor of nothing": lambda size: held(call(named("torch", "FloatTensor"), size)),
    "an untyped storage of nothing": lambda size: held(call(named("torch.storage", "UntypedStorage"), size)),
}
TIME = {
    "keys of one hash": keys_of_one_hash,
    "a key of pairs of pairs": lambda size: held(filled({}, pairs(size), 1)),
    "a key of tuples in tuples": in_a_tuple,
    "lists in lists": lambda size: held(b"]" * size + b"a" * (size - 1)),
    "tuples in tuples": lambda size: held(b")" + b"\x85" * size),
}
ARRAYS = {
    "compressed zeros": lambda size: npz(packed(b"w.npy", size, start=npy(b"", shape=f"({size // 4},)"))),
    "a compressed array in Fortran order": lambda size: npz(
        packed(b"w.npy", size, start=npy(b"", shape=f"(4, {size // 16})", order="True"))
    ),
    "a header of spaces": lambda size: safetensors_bytes(
        b'{"w":' + entry(shape="[0]", size=0).encode() + b"}" + b" " * min(size, LONGEST_HEADER)
    ),
    "a header of many names": many_names,
}


def with_hole(name):
    """Return a function that gives the bytes before and behind a hole, which is a member of this name, or none."""

    def around(size):
        parts = parts_of(members_of({"w": SMALL}))
        body, directory = hand_zipped.body_and_directory([x for x in parts if x.name != name])
        lengths = struct.pack("<2H2Q", 1, 16, size, size)  # zip64
        hole = Part(name, b"", 0, MOST, MOST, extra=lengths)
        more, count = (hole.entry(len(body)), len(parts)) if name else (b"", len(parts))
        before = body + (hole.header() if name else b"")
        directory, place = directory + more, len(before) + size
        ends = hand_zipped.end64(count, len(directory), place) + hand_zipped.locator(place + len(directory))
        return before, directory + ends + hand_zipped.end(0xFFFF, MOST, MOST)

    return around


HOLES = {
    "a hole": with_hole(b""),
    "a pickle of zeros": with_hole(b"a/data.pkl"),
    "a byte order of zeros": with_hole(b"a/byteorder"),
    "a version of zeros": with_hole(b"a/version"),
    "a storage of zeros": with_hole(b"a/data/0"),
}
ERRORS |= {
    "a pickle of zeros": "UnpicklingError",
    "a byte order of zeros": "ValueError",
    "a version of zeros": "RuntimeError",
    "a storage of zeros": "RuntimeError",
}
