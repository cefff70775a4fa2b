"""Print the GPU, its driver, and the releases of what clips on it. `scripts/gpu_run.py` runs this first."""

import importlib.metadata
import os
import platform
import shutil
import subprocess

NAMES = ("torch", "triton", "jax", "jaxlib", "numpy", "opacus", "optree", "nanobind", "scikit-build-core", "pytest")


def release(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def main():
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        subprocess.run(query, check=False, timeout=20)
    print(f"Python {platform.python_version()}, {os.cpu_count()} processors, {platform.platform()}")
    print(", ".join(f"{name} {release(name)}" for name in NAMES), flush=True)

    import torch

    if not torch.cuda.is_available():
        print("PyTorch finds no GPU.")
        return
    one = torch.cuda.get_device_properties(0)
    print(f"PyTorch finds {one.name}, compute capability {one.major}.{one.minor}, CUDA {torch.version.cuda}.")


if __name__ == "__main__":
    main()
