"""Clip gradients stored in several safetensors files, with one file in memory at a time."""

import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

import gradclip

MAX_NORM = 1.0
FILES = 4


def write_gradients(folder):
    """Write gradients like those of a large model: files with several arrays, in two dtypes."""
    for index in range(FILES):
        rng = np.random.default_rng(index)
        dtype = np.float16 if index % 2 else np.float32
        layers = {f"layers.{index}.{name}": rng.normal(size=(256, 256)).astype(dtype) for name in ("query", "key")}
        save_file(layers, folder / f"model-{index + 1:05}-of-{FILES:05}.safetensors")


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_gradients(folder)
        files = sorted(folder.glob("*.safetensors"))
        whole = sum(gradclip.partial_norm(load_file(file)) for file in files)
        print(f"{len(files)} files, norm {whole.norm:.4f}, known from {len(whole.numbers)} numbers a file")
        for file in files:
            save_file(whole.clip(load_file(file), MAX_NORM), file)
        clipped = sum(gradclip.partial_norm(load_file(file)) for file in files)
        at_once = gradclip.global_norm([load_file(file) for file in files])
        print(f"clipped file by file: norm {clipped.norm:.6f}, at most {MAX_NORM}; of all in memory {at_once:.6f}")


if __name__ == "__main__":
    main()
