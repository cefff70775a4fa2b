"""A federated round over files: clients write their updates, and the server checks, clips and averages them."""

import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

import gradclip

MAX_NORM = 1.0
MODEL = {
    "encoder.w": np.zeros((256, 64), np.float16),
    "head.w": np.zeros((64, 10), np.float32),
    "head.b": np.zeros(10, np.float32),
    "batches": np.zeros((), np.int64),
}


def trained(seed):
    """Return an update, new weights minus old ones, as training on a client's data would give it."""
    rng = np.random.default_rng(seed)
    changes = {name: rng.normal(size=x.shape).astype(x.dtype) for name, x in MODEL.items() if name != "batches"}
    return changes | {"batches": np.array(100)}


def clipped(update):
    """Clip with gradclip. The counter comes back as it is."""
    return gradclip.clip_by_global_norm(update, MAX_NORM)[0]


def clipped_as_usual(update):
    """Clip with the usual formula. Rounding to the dtype can push the norm above the threshold."""
    floats = {name: x for name, x in update.items() if name != "batches"}
    norm = sum(np.sum(np.square(x, dtype=np.float64)) for x in floats.values()) ** 0.5
    return update | {name: (x * (MAX_NORM / norm)).astype(x.dtype) for name, x in floats.items()}


def write_updates(folder):
    """Do what five clients do."""
    np.savez(folder / "anna.npz", **clipped(trained(0)))
    save_file(clipped(trained(1)), folder / "boris.safetensors")
    np.savez(folder / "carol.npz", **clipped_as_usual(trained(3)))
    np.savez(folder / "nancy.npz", **trained(2) | {"head.b": np.full(10, np.nan, np.float32)})
    save_file({name: x for name, x in clipped(trained(4)).items() if name != "head.b"}, folder / "oscar.safetensors")


def load(file):
    """Return the arrays of a file by name. Does not load pickles, which could run code."""
    if file.suffix == ".safetensors":
        return load_file(file)
    with np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)


def average(updates):
    """Return the mean of the floating-point arrays of updates."""
    names = [name for name, x in MODEL.items() if x.dtype.kind == "f"]
    return {name: np.mean([update[name].astype(np.float32) for update in updates], axis=0) for name in names}


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_updates(folder)

        # The server trusts nobody. The check is exact, and compares names, shapes and dtypes with the model's.
        accepted, shortened = [], []
        for file in sorted(folder.iterdir()):
            update = load(file)
            checked = gradclip.check_update(update, MAX_NORM, like=MODEL)
            print(f"{file.name}: {'accepted' if checked else 'REFUSED'}. {checked.reason}")
            if checked:
                accepted.append(update)
            elif checked.excess > 0 and gradclip.check_update(clipped(update), MAX_NORM, like=MODEL):
                shortened.append(clipped(update))  # too large, but nothing else is wrong

        strict, mild = average(accepted), average(accepted + shortened)
        print(f"mean of the {len(accepted)} accepted updates: norm {gradclip.global_norm(strict):.4f}")
        print(f"with {len(shortened)} more that the server clipped: norm {gradclip.global_norm(mild):.4f}")


if __name__ == "__main__":
    main()
