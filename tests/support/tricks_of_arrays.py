"""Files of safetensors and NumPy that one reader takes for something else than another."""

import zlib
from zipfile import BadZipFile

from safetensors import SafetensorError

import hand_zipped
from hand_pickled import MANY, ONES, numbers
from hand_zipped import Part, parts_of
from stored_files import deflated, npy_bytes, safetensors_bytes
from tricks import Trick


def entry(start=0, dtype="F32", shape="[4]", size=16, end=None, more=""):
    """Return the text of an entry in a header."""
    end = start + size if end is None else end
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{end}]{more}}}'


def safe(*items, data=ONES):
    """Return a file whose header has these names and entries."""
    return safetensors_bytes(("{" + ",".join(f'"{name}":{x}' for name, x in items) + "}").encode(), data)


BOTH = ONES + MANY
W = ("w", entry())
NAMES_AND_PLACES = {
    "two arrays": Trick(safe(W, ("x", entry(16)), data=BOTH), 1e6, usual=True),
    "in another order": Trick(safe(("x", entry(16)), W, data=BOTH), 1e6),
    "a name twice": Trick(safe(("w", entry(0, shape="[2,2]")), W, data=MANY), 1e6),
    "a name twice, at two places": Trick(safe(W, ("w", entry(16)), data=BOTH), SafetensorError),
    "a name twice, one escaped": Trick(safe(("\\u0077", entry(0, shape="[2,2]")), W, data=MANY), 1e6),
    "a name twice, one of another dtype": Trick(safe(("w", entry(0, "F64", "[2]")), W, data=MANY), 1e6),
    "a field twice": Trick(safe(("w", entry(0, more=',"dtype":"I32"')), data=MANY), SafetensorError),
    "offsets twice": Trick(safe(("w", entry(0, more=',"data_offsets":[16,32]')), data=BOTH), SafetensorError),
    "a field more": Trick(safe(("w", entry(0, more=',"x":[1]')), data=MANY), 1e6),
    "an overlap": Trick(safe(W, ("x", entry(8)), data=BOTH[:24]), SafetensorError),
    "two arrays at one place": Trick(safe(W, ("x", entry())), SafetensorError),
    "a gap": Trick(safe(W, ("x", entry(32)), data=ONES + MANY + MANY), SafetensorError),
    "a gap at the start": Trick(safe(("w", entry(16)), data=BOTH), SafetensorError),
    "bytes behind": Trick(safe(W, data=BOTH), SafetensorError),
    "fewer bytes": Trick(safe(W, data=ONES[:12]), SafetensorError),
    "an end before the start": Trick(safe(("w", entry(16, end=0)), data=MANY), SafetensorError),
    "fewer bytes than numbers": Trick(safe(("w", entry(size=12)), data=MANY[:12]), SafetensorError),
    "no numbers, anywhere": Trick(safe(W, ("x", entry(8, shape="[0]", size=0))), SafetensorError),
    "no numbers, at the end": Trick(safe(W, ("x", entry(16, shape="[0]", size=0))), 1.0),
    "a name of a control character": Trick(safe(("\\u0000\\u001b[2J", entry())), 1.0),
    "a name of half a character": Trick(safe(("\\ud800", entry())), SafetensorError),
    "a name that is no text": Trick(safetensors_bytes(b'{"\xff":' + entry().encode() + b"}", ONES), SafetensorError),
    "metadata twice": Trick(safe(("__metadata__", '{"a":"b"}'), ("__metadata__", "{}"), W), SafetensorError),
    "metadata as an array": Trick(safe(("__metadata__", entry()), W), SafetensorError),
    "metadata of numbers": Trick(safe(("__metadata__", '{"a":1}'), W), SafetensorError),
    "metadata of nothing": Trick(safe(("__metadata__", "null"), W), 1.0),
}
VALUES = {
    "a length in floating point": Trick(safe(("w", entry(shape="[4.0]"))), SafetensorError),
    "a length with an exponent": Trick(safe(("w", entry(shape="[4e0]"))), SafetensorError),
    "a length of -0": Trick(safe(("w", entry(shape="[-0,4]"))), SafetensorError),
    "a negative length": Trick(safe(("w", entry(shape="[-1,-4]"))), SafetensorError),
    "a length with a zero before": Trick(safe(("w", entry(shape="[04]"))), SafetensorError),
    "a length that is NaN": Trick(safe(("w", entry(shape="[NaN]"))), SafetensorError),
    "a length of 2**64 + 4": Trick(safe(("w", entry(shape=f"[{2**64 + 4}]"))), SafetensorError),
    "lengths whose product overflows": Trick(safe(("w", entry(shape=f"[{2**32},{2**32},4]"))), SafetensorError),
    "lengths whose product overflows to 4": Trick(safe(("w", entry(shape=f"[{2**63 + 2},2]"))), SafetensorError),
    "an offset of 2**64 + 16": Trick(safe(("w", entry(end=2**64 + 16))), SafetensorError),
    "no length": Trick(safe(("w", entry(shape="[]", size=4)), data=MANY[:4]), 1e6),
    "another dtype": Trick(safe(("w", entry(dtype="F16", shape="[8]")), data=numbers(*[1e3] * 8, dtype="<f2")), 1000.0),
    "a dtype in small letters": Trick(safe(("w", entry(dtype="f32"))), SafetensorError),
    "a dtype of 4 bits": Trick(safe(("w", entry(dtype="F4", shape="[32]"))), AttributeError, NotImplementedError),
    "complex numbers": Trick(safe(("w", entry(dtype="C64", shape="[2]")), data=numbers(1e6, 0, dtype="<c8")), 1e6),
    "a space before": Trick(safetensors_bytes(b' {"w":' + entry().encode() + b"}", ONES), 1.0),
    "spaces behind": Trick(safetensors_bytes(b'{"w":' + entry().encode() + b"}   ", ONES), 1.0),
    "a zero behind": Trick(safetensors_bytes(b'{"w":' + entry().encode() + b"}\0", ONES), SafetensorError),
    "a second value behind": Trick(safetensors_bytes(b'{"w":' + entry().encode() + b"}{}", ONES), SafetensorError),
    "a comma behind": Trick(safetensors_bytes(b'{"w":' + entry().encode() + b",}", ONES), SafetensorError),
    "no arrays": Trick(safetensors_bytes(b"{}"), 0.0),
    "no arrays, and bytes": Trick(safetensors_bytes(b"{}", MANY), SafetensorError),
    "a deep header": Trick(safe(("w", "[" * 500 + "]" * 500)), SafetensorError),
    "a header longer than the file": Trick((1 << 40).to_bytes(8, "little") + b'{"w":', SafetensorError),
    "a header of 2**63 bytes": Trick((1 << 63).to_bytes(8, "little") + b'{"w":', SafetensorError),
}
SAFETENSORS = NAMES_AND_PLACES | VALUES


def head(descr="'<f4'", order="False", shape="(4,)", more=""):
    """Return the text of a header of NumPy."""
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, {more}}}"


def npy(data=MANY, version=(1, 0), **fields):
    return npy_bytes(head(**fields), data, version)


NPY = {
    "an array": Trick(npy(), 1e6, usual=True),
    "Fortran order": Trick(npy(shape="(2, 2)", order="True"), 1e6, usual=True),
    "bytes behind": Trick(npy(BOTH), 1.0),
    "an array behind": Trick(npy(ONES) + npy(MANY), 1.0),
    "fewer bytes": Trick(npy(MANY[:12]), ValueError),
    "a shape twice": Trick(npy(BOTH, more="'shape': (8,)"), 1e6),
    "a dtype twice": Trick(npy(numbers(1e6, 1e6, dtype="<f8"), more="'descr': '<f8', 'shape': (2,)"), 1e6),
    "a key more": Trick(npy(more="'x': 1"), ValueError),
    "a boolean as a length": Trick(npy(shape="(True,)"), TypeError),
    "a shape that is a list": Trick(npy(shape="[4]"), ValueError),
    "a negative length": Trick(npy(shape="(-1,)"), ValueError),
    "a length with an L": Trick(npy(shape="(4L,)"), 1e6),
    "a length in hexadecimal": Trick(npy(shape="(0x4,)"), 1e6),
    "a sum as a length": Trick(npy(shape="(2+2,)"), ValueError),
    "a huge length": Trick(npy(shape=f"({2**62},)"), ValueError),
    "a length beyond 64 bits": Trick(npy(shape=f"({2**64 + 4},)"), OverflowError),
    "a product beyond 64 bits": Trick(npy(shape=f"({2**32}, {2**32}, 4)"), ValueError),
    "a product of nothing": Trick(npy(shape=f"(0, {2**62})"), ValueError),
    "65 axes": Trick(npy(shape=f"({'1,' * 65})"), ValueError),
    "an order that is 1": Trick(npy(order="1"), ValueError),
    "an order that is None": Trick(npy(order="None"), ValueError),
    "big-endian": Trick(npy(numbers(*[1e6] * 4, dtype=">f4"), descr="'>f4'"), 1e6),
    "the order of this machine": Trick(npy(descr="'=f4'"), 1e6),
    "a dtype without an order": Trick(npy(descr="'f4'"), 1e6),
    "a dtype by name": Trick(npy(descr="'float32'"), 1e6),
    "a dtype of fields": Trick(npy(descr="[('w', '<f4')]"), 1e6),
    "a dtype of arrays": Trick(npy(descr="('<f4', (2,))", shape="(2,)"), ValueError, 1e6),
    "a dtype without meaning": Trick(npy(descr="'V4'"), 0.0),
    "times": Trick(npy(descr="'<m8[s]'", shape="(2,)"), 0.0),
    "objects": Trick(npy(b"\x80\x02K\1.", descr="'|O'", shape="()"), ValueError),
    "a comment in the header": Trick(npy_bytes(head() + " # 'shape': (2,)", MANY), 1e6),
    "a line break in the header": Trick(npy_bytes(head() + "\n\n", MANY), 1e6),
    "something behind the header": Trick(npy_bytes(head() + " x", MANY), ValueError),
    "two literals": Trick(npy_bytes(head() + "\n" + head(shape="(2,)"), MANY), ValueError),
    "a zero in the header": Trick(npy_bytes(head() + "\0", MANY), ValueError),
    "a long header": Trick(npy_bytes(head() + " " * 20_000, MANY), ValueError),
    "a deep header": Trick(npy(shape="(" * 300 + ")" * 300), ValueError),
    "version 2": Trick(npy(version=(2, 0)), 1e6),
    "version 3": Trick(npy(version=(3, 0), descr="[('é', '<f4')]"), 1e6),
    "version 4": Trick(npy(version=(4, 0)), ValueError),
    "version 1.1": Trick(npy(version=(1, 1)), ValueError),
}


def npz(*members):
    return hand_zipped.archive(*parts_of(members))


def packed(name, data, **changes):
    return Part(name, deflated(data), 8, **{"size": len(data), "crc": zlib.crc32(data)} | changes)


def with_header(**changes):
    """Return an archive in which the own header of a member differs from the directory's entry."""
    part = Part(b"w.npy", npy())
    return hand_zipped.archive((part, part.header(**changes)))


def two(layout, first, second):
    """Return an archive that has two archives in a layout."""
    return layout(parts_of([("w.npy", npy(first))]), parts_of([("w.npy", npy(second))]))


NPZ = {
    "two arrays": Trick(npz(("w.npy", npy(ONES)), ("x.npy", npy())), 1e6, usual=True),
    "w beside w.npy": Trick(npz(("w", npy()), ("w.npy", npy(ONES))), 1e6),
    "w.npy beside w": Trick(npz(("w.npy", npy(ONES)), ("w", npy())), 1e6),
    "w.npy beside w.npy.npy": Trick(npz(("w.npy", npy(ONES)), ("w.npy.npy", npy())), 1.0, 1e6),
    "w alone": Trick(npz(("w", npy())), 1e6),
    "w.npy twice": Trick(npz(("w.npy", npy()), ("w.npy", npy(ONES))), 1.0),
    "w.npy twice, the other way": Trick(npz(("w.npy", npy(ONES)), ("w.npy", npy())), 1e6),
    "W.npy beside w.npy": Trick(npz(("W.npy", npy()), ("w.npy", npy(ONES))), 1e6),
    "a name that ends in NUL": Trick(npz(("w.npy\0x", npy())), 1e6),
    "two names up to a NUL": Trick(npz(("w.npy\0x", npy()), ("w.npy", npy(ONES))), 1.0),
    "a folder": Trick(npz(("a/", b""), ("a/w.npy", npy())), 1e6),
    "a member that is no array": Trick(npz(("w.npy", MANY), ("x.npy", npy(ONES))), 1.0),
    "an empty member": Trick(npz(("w.npy", b""), ("x.npy", npy(ONES))), 1.0),
    "objects": Trick(npz(("w.npy", npy(b"\x80\x02K\1.", descr="'|O'", shape="()"))), ValueError),
    "a header that promises less": Trick(npz(("w.npy", npy(BOTH))), 1.0),
    "a header that promises more": Trick(npz(("w.npy", npy(MANY[:12]))), ValueError),
    "an array in an archive in an archive": Trick(npz(("w.npy", npz(("w.npy", npy())))), 0.0),
    "fields": Trick(npz(("w.npy", npy(descr="[('w', '<f4')]"))), 1e6),
    "another name of its own": Trick(with_header(name=b"x.npy"), BadZipFile),
    "another method of its own": Trick(with_header(method=8), 1e6),
    "other sizes of its own": Trick(with_header(size=1, packed=1), 1e6),
    "another checksum of its own": Trick(with_header(crc=1), 1e6),
    "extra bytes of its own": Trick(with_header(extra=ONES), 1e6),
    "encrypted, as its own header says": Trick(with_header(flags=1), 1e6),
    "encrypted": Trick(npz(Part(b"w.npy", npy(), flags=1)), RuntimeError),
    "a wrong checksum": Trick(npz(Part(b"w.npy", npy(), crc=1)), BadZipFile),
    "two sizes": Trick(npz(Part(b"w.npy", npy() + MANY, size=len(npy()))), BadZipFile),
    "compressed": Trick(npz(packed(b"w.npy", npy())), 1e6, usual=True),
    "compressed, with a wrong checksum": Trick(npz(packed(b"w.npy", npy(), crc=1)), BadZipFile),
    "compressed, with more than promised": Trick(npz(packed(b"w.npy", npy(BOTH), size=len(npy()))), BadZipFile),
    "compressed, with less than promised": Trick(npz(packed(b"w.npy", npy(), size=1 << 30)), 1e6),
    "compressed, with bytes behind": Trick(
        npz(Part(b"w.npy", deflated(npy()) + b"x", 8, len(npy()), crc=zlib.crc32(npy()))), 1e6
    ),
    "a method that is not known": Trick(npz(Part(b"w.npy", npy(), 97)), NotImplementedError),
    "two directories": Trick(two(hand_zipped.by_offset_and_by_place, ONES, MANY), 1e6),
    "two ends of zip64": Trick(two(hand_zipped.by_locator_and_by_place, ONES, MANY), 1e6),
    "a member that is not counted": Trick(
        hand_zipped.archive(*parts_of([("w.npy", npy(ONES)), ("x.npy", npy())]), hidden=1), 1e6
    ),
    "bytes before": Trick(b"PK\3\4" + bytes(60) + npz(("w.npy", npy())), 1e6),
    "bytes behind": Trick(npz(("w.npy", npy())) + b"x", 1e6),
    "an archive behind an archive": Trick(npz(("w.npy", npy(ONES))) + npz(("w.npy", npy())), 1e6),
    "no arrays": Trick(npz(), 0.0),
}
