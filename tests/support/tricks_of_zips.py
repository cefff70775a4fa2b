"""Checkpoints whose archives are one thing to PyTorch and another to a reader of zip files."""

import io
import zlib

import torch

import hand_zipped
from hand_pickled import LARGE, MANY, ONES, SMALL, members_of, numbers, tensor
from hand_zipped import Part, parts_of
from stored_files import deflated, npy_bytes
from tricks import ANY, Trick

W, X = {"w": SMALL}, {"w": LARGE}


def archive(value=W, first=(), last=(), hidden=0, **records):
    """Return a checkpoint with more members before and after its own."""
    return hand_zipped.archive(*parts_of([*first, *members_of(value, **records).items(), *last]), hidden=hidden)


def two(layout, first, second, **more):
    """Return an archive that has two checkpoints in a layout."""
    return layout(parts_of(members_of(first)), parts_of(members_of(second)), **more)


def pickle_of(value):
    return members_of(value)["a/data.pkl"]


def replaced(name, part, header=None):
    """Return a checkpoint with another member in place of one, or another header of it."""
    parts = parts_of(members_of(X))
    return hand_zipped.archive(*((part, header or part.header()) if x.name == name else x for x in parts))


def packed(name, data):
    return Part(name, deflated(data), 8, len(data), crc=zlib.crc32(data))


def with_header(**changes):
    """Return a checkpoint in which the own header of a storage differs from the directory's entry."""
    part = Part(FIRST, MANY)
    return replaced(FIRST, part, part.header(**changes))


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


FIRST, UPPER = b"a/data/1", pickle_of(X)
FOUR = "{'descr': '<f4', 'fortran_order': False, 'shape': (4,), }"
VERSION = {".format_version": b"1"}
WITHOUT_STORAGES = {"data__0": None, "data__1": None}
APART = [("a/data/0", ONES), ("a/xx", MANY * 99), ("a/data/1", ONES)]
NAMES = {
    "DATA.PKL beside data.pkl": Trick(archive(first=[("a/DATA.PKL", UPPER)], last=[("a/z", b"")]), 1e6),
    "DATA.PKL beside data.pkl, passed over": Trick(archive(first=[("a/DATA.PKL", UPPER)]), 1.0),
    "DATA/0 beside data/0": Trick(archive(first=[("a/DATA/0", MANY)]), 1e6),
    "B beside b": Trick(archive({"w": tensor("b")}, last=[("a/data/B", MANY)], data__b=ONES), 1e6),
    "DATA.PKL alone": Trick(archive(last=[("a/DATA.PKL", UPPER)], data_pkl=None), 1e6),
    "another folder first": Trick(archive(first=members_of(X, "b").items()), RuntimeError),
    "another folder last": Trick(archive(last=members_of(X, "b").items()), RuntimeError),
    "an array beside the folder": Trick(archive(last=[("w.npy", npy_bytes(FOUR, MANY))]), RuntimeError),
    "a pickle deeper": Trick(archive(last=[("a/b/data.pkl", UPPER)]), 1.0),
    "the pickle twice": Trick(archive(first=[("a/data.pkl", UPPER)]), 1.0),
    "the pickle twice, the other way": Trick(archive(X, first=[("a/data.pkl", pickle_of(W))]), 1e6),
    "a storage twice": Trick(archive(first=[("a/data/0", MANY)]), 1e6),
    "a storage twice, the other way": Trick(archive(last=[("a/data/0", MANY)]), 1.0),
    "a pickle whose name ends in NUL": Trick(
        archive(last=[("a/DATA.PKL", UPPER), ("a/data.pkl\0", pickle_of(W))], data_pkl=None), 1e6
    ),
    "a storage whose name ends in NUL": Trick(
        archive(last=[("a/DATA/0", MANY), ("a/data/0\0", ONES)], data__0=None), 1e6
    ),
    "a name that is another in CP437": Trick(
        archive({"w": tensor("├⌐")}, last=[("a/data/├⌐", MANY), ("a/data/é", ONES)]), 1e6
    ),
    "a name that is no text": Trick(archive(last=[(b"a/data/\x82", ONES)]), UnicodeDecodeError),
    "one storage by two names": Trick(archive([tensor("b"), tensor("B")], data__b=MANY), 1e6),
    "one storage by two names, swapped twice": Trick(
        archive([tensor("b"), tensor("B")], data__b=numbers(*[1e6] * 4, dtype=">f4"), byteorder=b"big"), 1e6, ANY
    ),
}
# PyTorch extracts nothing into the memory of what is a folder, and returns what was there before.
ARCHIVES = {
    "two directories": Trick(two(hand_zipped.by_offset_and_by_place, X, W), 1e6),
    "two directories, the other way": Trick(two(hand_zipped.by_offset_and_by_place, W, X), 1.0),
    "two ends of zip64": Trick(two(hand_zipped.by_locator_and_by_place, X, W), 1e6),
    "two ends of zip64, the other way": Trick(two(hand_zipped.by_locator_and_by_place, W, X), 1.0),
    "an end in the comment": Trick(two(hand_zipped.with_end_in_comment, W, X), 1e6),
    "an end in the comment, cut off": Trick(two(hand_zipped.with_end_in_comment, X, W, cut=1), 1e6),
    "members that are not counted": Trick(
        archive(last=[("a/DATA.PKL", UPPER), ("a/data.pkl", pickle_of(W))], hidden=1, data_pkl=None), 1e6
    ),
    "an archive behind an archive": Trick(archive(W) + archive(X), 1.0),
    "bytes behind": Trick(archive(X) + b"x" * 9, 1e6),
    "an end too far from the end": Trick(archive(X) + bytes(1 << 17), RuntimeError),
    "bytes before": Trick(b"PK\3\4" + bytes(96) + archive(X), RuntimeError),
    "a compressed pickle": Trick(replaced(b"a/data.pkl", packed(b"a/data.pkl", UPPER)), 1e6),
    "a compressed storage": Trick(replaced(FIRST, packed(FIRST, MANY)), 1e6, ANY),
    "a storage that says it is compressed": Trick(with_header(method=8), 1e6),
    "a storage whose own name differs": Trick(with_header(name=b"a/data/x"), 1e6),
    "a storage whose own name is shorter": Trick(with_header(name=b"a"), 1e6),
    "a storage whose own sizes differ": Trick(with_header(size=1, packed=1), 1e6),
    "a storage whose own checksum differs": Trick(with_header(crc=1), 1e6),
    "a storage with a wrong checksum": Trick(replaced(FIRST, Part(FIRST, MANY, crc=1)), 1e6),
    "a storage with extra bytes of its own": Trick(with_header(extra=ONES), 1e6),
    "a storage that is encrypted": Trick(replaced(FIRST, Part(FIRST, MANY, flags=1)), RuntimeError),
    "a storage that says it is encrypted": Trick(with_header(flags=1), 1e6),
    "a storage that is a folder": Trick(replaced(FIRST, Part(FIRST, MANY, attributes=0x10)), ANY, 1e6, refused=True),
    "a storage that is a folder by its name": Trick(
        archive({"w": tensor("b/")}, **{"data/b/": MANY}), ANY, 1e6, refused=True
    ),
    "a pickle that is a folder": Trick(
        replaced(b"a/data.pkl", Part(b"a/data.pkl", UPPER, attributes=0x10)), object, refused=True
    ),
    "a storage of no bytes": Trick(replaced(FIRST, Part(FIRST, MANY, packed=0)), RuntimeError),
    "a storage of two sizes": Trick(replaced(FIRST, Part(FIRST, MANY, size=16, packed=8)), RuntimeError),
    "a storage larger than the file": Trick(
        replaced(FIRST, Part(FIRST, MANY, size=1 << 31, packed=1 << 31)), RuntimeError
    ),
    "a storage that unpacks to less than it says": Trick(
        replaced(FIRST, Part(FIRST, deflated(MANY), 8, 1 << 20)), RuntimeError, ANY
    ),
}
RECORDS = {
    "what torch.save writes": Trick(saved({"w": torch.ones(4), "x": torch.full((4,), 1e6)}), 1e6, usual=True),
    "offsets that differ from those that are computed": Trick(
        archive([SMALL, LARGE], last=APART, **WITHOUT_STORAGES, **VERSION),
        1.0,
        by_offsets=1e6,
    ),
    "offsets that cannot be computed": Trick(archive([LARGE, SMALL], **VERSION), 1e6, by_offsets=AssertionError),
    "an alignment of 0": Trick(archive(X, **{".storage_alignment": b"0"}), 1e6),
    "an alignment that is no number": Trick(archive(X, **{".storage_alignment": b"x"}), ValueError),
    "no version": Trick(archive(X, version=None), RuntimeError),
    "a version to come": Trick(archive(X, version=b"99"), RuntimeError),
    "a version that is no number": Trick(archive(X, version=b"x"), RuntimeError),
    "a TorchScript": Trick(archive(X, constants_pkl=b"x"), RuntimeError),
    "an id that is no text": Trick(archive(X, **{".data/serialization_id": b"\xff"}), UnicodeDecodeError),
}
ZIPPED = NAMES | ARCHIVES | RECORDS
