"""Run in an environment that holds the built wheel and its required dependencies, nothing else."""

import importlib.metadata
import sys

EXPECTED = {"gradclip", "numpy", "optree", "array-api-compat", "typing-extensions"}


def main():
    import numpy as np

    import gradclip

    names = {d.metadata["Name"].lower().replace("_", "-") for d in importlib.metadata.distributions()}
    installed = names - {"pip", "setuptools"}
    if installed != EXPECTED:
        sys.exit(f"expected {sorted(EXPECTED)} in the environment, found {sorted(installed)}")
    clipped, norm = gradclip.clip_by_global_norm({"w": np.array([3.0, 4.0])}, max_norm=1.0)
    if norm != 5.0 or clipped["w"].round(6).tolist() != [0.6, 0.8]:
        sys.exit(f"expected norm 5.0 and [0.6, 0.8], got {norm} and {clipped}")
    print(f"the wheel of gradclip {gradclip.__version__} works with {', '.join(sorted(installed - {'gradclip'}))}")


if __name__ == "__main__":
    main()
