"""Files of arrays for tests: read as whole arrays, and written with anything wrong."""

import json
import struct
import zlib

import numpy as np

from gradclip._src.backends.host.arrays import as_float
from gradclip._src.updates.files import open_file


def whole(array, pieces=None):
    """Return all numbers of a stored array as one flat array, bfloat16 as float32."""
    found = [as_float(x.data, x.dtype).copy() for x in (pieces or array.pieces)()]
    return np.concatenate(found) if found else np.empty(0)


def values(path):
    """Return the dtype, the shape and the numbers in C order of each array that counts, and None for the others."""
    with open_file(path) as file:
        return {x.name: (x.dtype, x.shape, whole(x, x.in_c_order) if x.kind.counts else None) for x in file.arrays}


def safetensors_bytes(header, data=b""):
    """Return a file with a header, given as JSON's value or as bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def npy_bytes(text, data=b"", version=(1, 0)):
    """Return an .npy file with any text as its header."""
    head = text.encode("utf-8")
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H" if version == (1, 0) else "<I", len(head)) + head + data


def member(name, data, **fields):
    """Return what `zip_bytes` writes for a member. `fields` replace those of the directory."""
    fields = {"crc": zlib.crc32(data), "packed": len(data), "size": len(data), "method": 0, "flags": 0x800} | fields
    return name.encode(), data, fields


def zip_bytes(*members):
    """Return an archive with these members, each with any fields."""
    body, directory = b"", b""
    for name, data, x in members:
        numbers = struct.pack("<4H3L2H", x["flags"], x["method"], 0, 0, x["crc"], x["packed"], x["size"], len(name), 0)
        offset = x.get("offset", len(body))
        body += b"PK\x03\x04" + struct.pack("<H", 20) + numbers + x.get("own_name", name) + data
        tail = struct.pack("<3H2L", 0, 0, 0, 0, offset)
        directory += b"PK\x01\x02" + struct.pack("<2H", 20, 20) + numbers + tail + name
    count = len(members)
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count, count, len(directory), len(body), 0)
    return body + directory + end


def deflated(data):
    """Return data as members of archives are deflated."""
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()
