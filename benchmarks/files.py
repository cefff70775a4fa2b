"""Time the norm of what is in a file, from a warm cache, beside only reading the file, and beside loading it first.

"plain readinto" reads the same bytes into one piece of memory, of the size that is fastest here: no reader is faster.
The files hold the parameters of GPT-2 small in 148 arrays, but the compressed one, which holds 20 of them.
"""

import random
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
from report import FILES, parser, rows, show, write_measured
from safetensors.torch import load_file, save_file
from timing import medians_of_clocks

import gradclip
from gradclip._src.core.norms import EUCLIDEAN
from gradclip._src.updates.files import difference, open_file
from gradclip._src.updates.measured import counts, measured

SIZES = [1 << 17, 1 << 18, 1 << 19, 1 << 20, 1 << 22]
LAYER = [
    (768,),
    (768,),
    (768, 2304),
    (2304,),
    (768, 768),
    (768,),
    (768,),
    (768,),
    (768, 3072),
    (3072,),
    (3072, 768),
    (768,),
]
SHAPES = [(50257, 768), (1024, 768), *LAYER * 12, (768,), (768,)]
RAW, OURS = "plain readinto", "gradclip norm"
PEAK = """
import sys
from pathlib import Path
from gradclip._src.updates.measured import measured
from gradclip._src.core.norms import EUCLIDEAN
from gradclip._src.updates.files import open_file
with open_file(Path(sys.argv[1])) as file:
    measured([x for x in file.arrays if x.kind.counts], EUCLIDEAN)
print(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
"""


def counted(file):
    return [x for x in file.arrays if counts(x.dtype)]


def norm(path):
    with open_file(path) as file:
        return measured(counted(file), EUCLIDEAN).value


def norm_of_difference(path, other):
    with open_file(path) as one, open_file(other) as two:
        return measured(counted(difference(one, two)), EUCLIDEAN).value


def plain(size, *paths):
    memory = np.empty(size, np.uint8)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(memory):
                pass


def with_checksum(path):
    """Read a file and compute its CRC-32, as every reader of an .npz file must."""
    memory, found = np.empty(1 << 19, np.uint8), 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(memory):
            found = zlib.crc32(memory[:count], found)
    return found


def by_numpy(path):
    found = np.load(path)
    return gradclip.global_norm(dict(found) if path.suffix == ".npz" else found)


def by_safetensors(path):
    return gradclip.global_norm(load_file(path))


def by_torch(path):
    return gradclip.global_norm(torch.load(path, weights_only=True, mmap=True, map_location="cpu"))


def write_files(folder, parts):
    """Write a file of each format. Return for each workload the paths, and the contender that loads them whole."""
    generator = torch.Generator().manual_seed(0)
    shapes = SHAPES[:: 148 // parts]
    tree = {f"w{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)}
    arrays = {name: x.numpy() for name, x in tree.items()}
    less = {name: x for name, x in arrays.items() if x.size < 2_000_000}
    save_file(tree, folder / "float32.safetensors")
    save_file({name: x + 1 for name, x in tree.items()}, folder / "other.safetensors")
    save_file({name: x.bfloat16() for name, x in tree.items()}, folder / "bfloat16.safetensors")
    save_file({name: x.to(torch.float8_e4m3fn) for name, x in tree.items()}, folder / "float8.safetensors")
    np.save(folder / "float32.npy", np.concatenate([x.reshape(-1) for x in arrays.values()]))
    np.savez(folder / "float32.npz", **arrays)
    np.savez_compressed(folder / "compressed.npz", **dict(list(less.items())[:20]))
    torch.save(tree, folder / "float32.pt")
    return {
        "safetensors, float32": ("float32.safetensors", "safetensors.load_file", by_safetensors),
        "safetensors, bfloat16": ("bfloat16.safetensors", "safetensors.load_file", by_safetensors),
        "safetensors, float8": ("float8.safetensors", None, None),
        ".npy, float32": ("float32.npy", "numpy.load", by_numpy),
        ".npz, float32": ("float32.npz", "numpy.load", by_numpy),
        ".npz, compressed": ("compressed.npz", "numpy.load", by_numpy),
        ".pt, float32": ("float32.pt", "torch.load, mapped", by_torch),
    }


def contenders(folder, name, library, load):
    """Return functions that read one file, by name."""
    path = folder / name
    found = {OURS: lambda: norm(path)}
    found |= {f"{RAW}, {size >> 10} KiB": lambda size=size: plain(size, path) for size in SIZES}
    if path.suffix == ".npz":
        found["plain readinto and crc32"] = lambda: with_checksum(path)
    if library:
        found[f"{library}, then the norm"] = lambda: load(path)
    return found


def peak(path):
    """Return the most resident memory, in MB, of a process that only measures a file."""
    found = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True)
    return int(found.stdout) * 1024 / 1e6


def timed(label, size, made, asked, memory):
    """Return rows of one workload: only the fastest size of plain reading is kept."""
    both = medians_of_clocks(made, asked.repeats, asked.seconds, (), 0)
    best = min((name for name in both if name.startswith(f"{RAW}, ")), key=lambda name: both[name][0])
    kept = {name: both[name] for name in both if name == best or not name.startswith(f"{RAW}, ")}
    described = {"workload": label, "case": "warm cache", "megabytes": size / 1e6, "peak": memory}
    found = rows(described, {name: wall for name, (wall, _) in kept.items()})
    for row in found:
        row |= {"processor": kept[row["name"]][1], "speed": kept[best][0] / row["ms"]}
        row["processor speed"] = kept[best][1] / row["processor"]
    show(label, found)
    print(f"{label:<43} speed {found[0]['speed']:.2f} by the wall, {found[0]['processor speed']:.2f} of the processor")
    return found


def main():
    asked = parser(__doc__, FILES, "a tenth of the arrays").parse_args()
    random.seed(0)
    torch.set_num_threads(1)
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for label, (file, library, load) in write_files(folder, 14 if asked.quick else 148).items():
            path = folder / file
            made = contenders(folder, file, library, load)
            found += timed(label, path.stat().st_size, made, asked, peak(path))
        one, other = folder / "float32.safetensors", folder / "other.safetensors"
        both = {f"{RAW}, {size >> 10} KiB": lambda size=size: plain(size, one, other) for size in SIZES}
        both = {f"{OURS} --minus": lambda: norm_of_difference(one, other)} | both
        found += timed("safetensors, float32, of a difference", 2 * one.stat().st_size, both, asked, None)
    write_measured({"repeats": asked.repeats, "rows": found}, asked)


if __name__ == "__main__":
    main()
