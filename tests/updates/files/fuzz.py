"""Damages valid files of every format, reads each, and counts what comes of it: a norm, or a FileError.

What is read is compared with what PyTorch, safetensors and NumPy load. It is wrong if they load other numbers.

    PYTHONPATH=tests/support python tests/updates/files/fuzz.py --cases 100000

Case n is the same in every run; `--first` starts at another one.
"""

import argparse
import collections
import io
import json
import math
import random
import resource
import struct
import sys
import tempfile
import time
import warnings
import zipfile
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save

import loaded
from gradclip._src.updates.files import FileError, difference, open_file
from gradclip._src.updates.measured import counts as is_measured
from stored_files import whole

NUMBERS = [0, 1, 2, 127, 255, 65_535, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
WORDS = ["F32", "F64", "F8_E5M2", "U8", "BF16", -1, 0, 1, 3, 2**32, 2**63, 2**70, 1.5, True, None, [], {}, "\x1b[2J"]
WORDS_OF_NPY = ["<f4", "|O", ">c16", "(3,)", "(2**9,)", "(-1,)", "True", "(99999999999,)", "((),)", "[", "0" * 40, "L"]
SLOW = 5.0  # seconds


def files():
    """Return valid files of each format, as bytes."""
    random_numbers = np.random.default_rng(0)
    tree = {
        "w": random_numbers.standard_normal((5, 7), np.float32),
        "layer.b": np.asfortranarray(random_numbers.standard_normal((3, 2))),
        "h": random_numbers.standard_normal(9).astype(np.float16),
        "n": np.arange(4),
    }
    tensors = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in tree.items()}
    tensors["t"] = tensors["w"].T[1:]
    nested = {"model": tensors, "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "lr": [0.1, None]}}
    found = {"safetensors": save(tensors and {name: np.ascontiguousarray(x) for name, x in tree.items()})}
    for name, write in {
        "npy": lambda file: np.save(file, tree["w"]),
        "npy in Fortran order": lambda file: np.save(file, tree["layer.b"]),
        "npz": lambda file: np.savez(file, **tree),
        "npz, compressed": lambda file: np.savez_compressed(file, **tree),
        "checkpoint": lambda file: torch.save(nested, file),
    }.items():
        file = io.BytesIO()
        write(file)
        found[name] = file.getvalue()
    return found


def flip(data, rng, others):
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def cut(data, rng, others):
    return data[: rng.randrange(len(data))]


def splice(data, rng, others):
    other = rng.choice(others)
    start, length, place = rng.randrange(len(other)), rng.randrange(1, 200), rng.randrange(len(data))
    keep = rng.choice([place, place + length])
    return data[:place] + other[start : start + length] + data[keep:]


def number(data, rng, others):
    """Write a number over one of 2, 4 or 8 bytes, most often near the start or the end, where lengths are."""
    form = rng.choice(["<H", "<I", "<Q", ">I"])
    size = struct.calcsize(form)
    if len(data) < size:
        return data + bytes(size)
    near = min(len(data) - size, rng.choice([40, 400, len(data)]))
    place = rng.randrange(near + 1)
    place = rng.choice([place, len(data) - size - place])
    return data[:place] + struct.pack(form, rng.choice(NUMBERS) % 2 ** (8 * size)) + data[place + size :]


def text(data, rng, others):
    """Change a header so that it stays a header: JSON, or a Python literal of the same length."""
    if data.startswith(b"\x93NUMPY"):
        length = 128 - 10
        head = data[10:128].decode("latin1")
        place = rng.randrange(len(head))
        word = rng.choice(WORDS_OF_NPY)
        head = (head[:place] + word + head[place + rng.choice([0, len(word)]) :])[:length].ljust(length)
        return data[:10] + head.encode("latin1") + data[128:]
    if data[8:9] == b"{":
        length = int.from_bytes(data[:8], "little")
        entries = list(json.loads(data[8 : 8 + length]).items())
        changed = json.dumps(dict(entries))
        name, entry = rng.choice(entries)
        field = rng.choice(list(entry))
        if isinstance(entry[field], list) and entry[field] and rng.random() < 0.7:
            entry[field][rng.randrange(len(entry[field]))] = rng.choice(WORDS)
        else:
            entry[field] = rng.choice(WORDS)
        changed = json.dumps(dict(entries))
        if rng.random() < 0.1:
            changed = changed[:-1] + f", {json.dumps(name)}: {json.dumps(entry)}}}"
        return struct.pack("<Q", len(changed)) + changed.encode() + data[8 + length :]
    return flip(data, rng, others)


def inside(data, rng, others):
    """Damage a member of an archive, and give it the right checksum, so that what reads it is reached."""
    if not data.startswith(b"PK"):
        return text(data, rng, others)
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(packed, "w") as new:
        names = old.namelist()
        chosen = next((x for x in names if x.endswith("data.pkl")), rng.choice(names))
        chosen = rng.choice([chosen, chosen, chosen, rng.choice(names)])
        for name in names:
            found = old.read(name)
            if name == chosen:
                found = rng.choice([flip, cut, splice, number, text])(found, rng, others) if found else b"x"
            new.writestr(zipfile.ZipInfo(name), found, old.getinfo(name).compress_type)  # without the time of day
    return packed.getvalue()


def several(data, rng, others):
    for _ in range(rng.randrange(2, 5)):
        data = rng.choice([flip, splice, number, inside_or_flip])(data, rng, others) if len(data) > 8 else data
    return data


def inside_or_flip(data, rng, others):
    try:
        return inside(data, rng, others)
    except Exception:  # what is no archive any more cannot be unpacked here
        return flip(data, rng, others)


WAYS = [flip, cut, splice, number, text, inside, several]


def damaged(case, valid):
    """Return the name of a format, and damaged bytes of it."""
    rng = random.Random(case)
    name = rng.choice(list(valid))
    way = rng.choice(WAYS)
    return name, way.__name__, way(valid[name], rng, list(valid.values()))


def norm(path, other):
    """Return the norm of all that counts in a file, and of the difference to a valid one if they match."""
    with open_file(path) as file:
        total = norm_of(file)
        try:
            with open_file(other) as valid:
                norm_of(difference(file, valid))
        except FileError:
            pass
        return total


def norm_of(file):
    total = 0.0
    with np.errstate(all="ignore"):
        for array in file.arrays:
            for piece in array.pieces() if array.dtype.startswith(("float", "complex", "bfloat")) else ():
                total += float(np.abs(piece.numbers()).sum())
    return total


def in_order(numbers):
    """Return the numbers of an array, ordered by their values, as bytes. All NaNs are one."""
    with np.errstate(all="ignore"):
        found = np.sort(np.asarray(numbers).astype(np.complex128), axis=None)
    found[np.isnan(found)] = np.nan
    return (found + 0.0).tobytes()


def loaders(path):
    """Return those who can load a file, by its first bytes and its members."""
    with path.open("rb") as file:
        start = file.read(4)
    if not start.startswith(b"PK"):
        return [loaded.by_numpy if start == b"\x93NUM" else loaded.by_safetensors_for_torch]
    with zipfile.ZipFile(path) as archive:
        is_checkpoint = any(name.endswith("data.pkl") for name in archive.namelist())
    return [loaded.by_torch, loaded.by_torch_mapped] if is_checkpoint else [loaded.by_numpy]


def compared(path):
    """Return how what is read compares with what is loaded: "the same", "refused" by a loader, or "other numbers"."""
    with open_file(path) as file:
        found = collections.Counter(in_order(whole(x)) for x in file.arrays if is_measured(x.dtype))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            others = [collections.Counter(map(in_order, load(path))) for load in loaders(path)]
    except Exception:  # whatever a loader raises
        return "refused"
    return "the same" if all(one == found for one in others) else "other numbers"


def outcomes(cases, folder):
    """Return how often each outcome occurred, and the cases that failed or were slow."""
    valid = files()
    for name, data in valid.items():
        (folder / name).write_bytes(data)
    path, counts, wrong = folder / "damaged", collections.Counter(), []
    for case in cases:
        name, way, data = damaged(case, valid)
        path.write_bytes(data)
        start = time.perf_counter()
        try:
            found = norm(path, folder / name)
            outcome = "norm" if math.isfinite(found) else "norm, not finite"
        except FileError as error:
            outcome = "FileError"
            if not str(error).isprintable():
                wrong.append((case, name, way, f"not in one line: {error!r}"))
        except Exception as error:
            outcome = "crash"
            wrong.append((case, name, way, repr(error)))
        if time.perf_counter() - start > SLOW:
            wrong.append((case, name, way, f"took {time.perf_counter() - start:.1f} s"))
        if outcome.startswith("norm"):
            others = compared(path)
            outcome = f"{outcome}, refused by who loads it" if others == "refused" else outcome
            wrong += [(case, name, way, others)] if others == "other numbers" else []
        counts[name, outcome] += 1
    return counts, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts, wrong = outcomes(range(options.first, options.first + options.cases), Path(folder))
    for key, count in sorted(counts.items()):
        print(*key, count, sep=", ")
    print(f"{sum(counts.values())} damaged files, {len(wrong)} crashes")
    print(
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MB of memory, with PyTorch, which writes files"
    )
    for one in wrong:
        print(*one)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
