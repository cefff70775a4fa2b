"""Clip a federated client's update that is stored in files, and check it on the server."""

import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

import gradclip

MAX_NORM = 1.0


def write_update(folder, seed):
    """Write an update, new weights minus old ones, to files of two formats and two dtypes."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    save(folder / "encoder.safetensors", {"w": rng.normal(size=(256, 64)).astype(np.float16)})
    save(folder / "decoder.safetensors", {"w": rng.normal(size=(64, 256)).astype(np.float16)})
    save(folder / "head.npz", {"w": rng.normal(size=(64, 10)), "b": rng.normal(size=10)})


def load(file):
    """Return the arrays of a file by name. Does not load pickles, which could run code."""
    if file.suffix == ".safetensors":
        return load_file(file)
    with np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)


def save(file, arrays):
    save_file(arrays, file) if file.suffix == ".safetensors" else np.savez(file, **arrays)


def clip_files(folder, max_norm):
    """Clip all files of a client by their global norm, with one file in memory at a time. Return that norm."""
    files = sorted(folder.iterdir())
    # 1. Measure each file. The partial norms are a few numbers each, and add up in any order.
    whole = sum(gradclip.partial_norm(load(file)) for file in files)
    # 2. Clip each file by the global norm.
    for file in files:
        save(file, whole.clip(load(file), max_norm, nonfinite="raise"))
    return whole.norm


def clip_as_usual(folder, max_norm):
    """Clip with the usual formula. Rounding to the dtype can push the norm above the threshold."""
    norm = sum(np.sum(np.square(x, dtype=np.float64)) for x in load_all(folder).values()) ** 0.5
    for file in sorted(folder.iterdir()):
        save(file, {name: (x * (max_norm / norm)).astype(x.dtype) for name, x in load(file).items()})


def load_all(folder):
    return {f"{file.name}/{name}": x for file in sorted(folder.iterdir()) for name, x in load(file).items()}


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed, client in enumerate(("anna", "boris", "carol", "nancy")):
            write_update(folder / client, seed)

        # On the clients.
        for client in ("anna", "boris"):
            norm = clip_files(folder / client, MAX_NORM)
            print(f"{client}: norm {norm:.2f}, clipped to {MAX_NORM:g} file by file")
        clip_as_usual(folder / "carol", MAX_NORM)
        save(folder / "nancy" / "head.npz", {"w": np.full((64, 10), np.nan), "b": np.zeros(10)})

        # On the server, which trusts nobody. The check is exact, and False if anything is NaN.
        kept = []
        for client in sorted(folder.iterdir()):
            update = load_all(client)
            fine = gradclip.norm_at_most(update, MAX_NORM)
            print(f"server: {client.name} {'accepted' if fine else 'REFUSED'}, norm {gradclip.global_norm(update):.7f}")
            kept += [update] if fine else []
        mean = {key: sum(update[key] for update in kept) / len(kept) for key in kept[0]}
        print(f"mean of {len(kept)} updates: norm {gradclip.global_norm(mean):.4f}")


if __name__ == "__main__":
    main()
