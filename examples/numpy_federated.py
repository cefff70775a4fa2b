"""Clip a federated client's update of NumPy arrays, and check the bound in exact arithmetic."""

import math
from fractions import Fraction

import numpy as np

import gradclip

MAX_NORM = 1.0
TRIALS = 1000


def random_update(seed):
    """Return what a client would send: new weights minus old ones, in two dtypes."""
    rng = np.random.default_rng(seed)
    return {
        "encoder": {
            "weight": rng.normal(size=(6, 8)).astype(np.float16),
            "bias": rng.normal(size=8).astype(np.float32),
        },
        "head": {"weight": rng.normal(size=(8, 3)).astype(np.float32), "bias": rng.normal(size=3).astype(np.float32)},
    }


def arrays_of(layers):
    return [array for layer in layers.values() for array in layer.values()]


def usual_formula(update, max_norm):
    """Clip with the usual formula in float32. The result has the dtypes of the input."""
    norm = np.sqrt(sum(np.sum(np.square(x, dtype=np.float32)) for x in arrays_of(update)))
    scale = min(np.float32(1.0), np.float32(max_norm) / norm)
    return {name: {key: (x * scale).astype(x.dtype) for key, x in layer.items()} for name, layer in update.items()}


def exact_square(arrays):
    """Return the square of the norm without rounding. Every float is a fraction."""
    return sum(Fraction(x) ** 2 for array in arrays for x in array.astype(np.float64).ravel().tolist())


def describe(name, arrays, max_norm):
    square = exact_square(arrays)
    verdict = "at most" if square <= Fraction(max_norm) ** 2 else "ABOVE"
    print(f"{name}: exact norm {math.sqrt(square):.10f}, {verdict} {max_norm}")


def main():
    update = random_update(seed=0)
    clipped, norm = gradclip.clip_by_global_norm(update, MAX_NORM)
    dtypes = sorted({str(x.dtype) for x in arrays_of(clipped)})
    print(f"update of norm {norm:.4f}, dtypes {' and '.join(dtypes)}, clipped to {MAX_NORM}")
    describe("  gradclip", arrays_of(clipped), MAX_NORM)
    describe("  usual formula", arrays_of(usual_formula(update, MAX_NORM)), MAX_NORM)

    # The thresholds are a prefix of the update's tree. Weight and bias of a layer share one threshold.
    thresholds = {"encoder": 0.8, "head": 0.5}
    by_layer, norms = gradclip.clip_by_layer_norm(update, thresholds)
    print("layer by layer, weight and bias together:")
    for name, threshold in thresholds.items():
        describe(f"  {name}, norm {norms[name]:.4f} before", by_layer[name].values(), threshold)

    above = {"gradclip": 0, "usual formula": 0}
    for seed in range(TRIALS):
        update = random_update(seed)
        results = {
            "gradclip": gradclip.clip_by_global_norm(update, MAX_NORM)[0],
            "usual formula": usual_formula(update, MAX_NORM),
        }
        for name, result in results.items():
            above[name] += exact_square(arrays_of(result)) > Fraction(MAX_NORM) ** 2
    counted = ", ".join(f"{name} {count}" for name, count in above.items())
    print(f"of {TRIALS} random updates, results with a norm above {MAX_NORM}: {counted}")


if __name__ == "__main__":
    main()
