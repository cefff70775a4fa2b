"""What a test could leave behind for others: settings of the process and of the frameworks that are imported."""

import os
import signal
import sys
import threading
import warnings

import numpy as np

from gradclip._src.flush_mode import flushes


def state():
    """Return the settings by name. Those of a framework are there once it is imported."""
    found = {
        "environment": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "folder": os.getcwd(),
        "import path": list(sys.path),
        "flush to zero": flushes(),
        "NumPy's errors": np.geterr(),
        "interrupt": signal.getsignal(signal.SIGINT),
        "hook of threads": threading.excepthook,
        "warnings shown by": warnings.showwarning,
    }
    for name, settings in OF_FRAMEWORKS.items():
        if name in sys.modules:
            found |= settings(sys.modules[name])
    return found


def of_torch(torch):
    return {
        "PyTorch's dtype": torch.get_default_dtype(),
        "PyTorch's device": torch.get_default_device(),
        "PyTorch's gradients": torch.is_grad_enabled(),
        "PyTorch's threads": torch.get_num_threads(),
        "PyTorch's determinism": torch.are_deterministic_algorithms_enabled(),
        "PyTorch's processes": torch.distributed.is_available() and torch.distributed.is_initialized(),
    }


def of_jax(jax):
    return {f"JAX's {name}": getattr(jax.config, f"jax_{name}") for name in JAX_SETTINGS}


def of_tensorflow(tensorflow):
    return {"TensorFlow runs eagerly": tensorflow.executing_eagerly()}


def of_keras(keras):
    return {"Keras' dtype": keras.config.floatx()}


JAX_SETTINGS = ("enable_x64", "disable_jit", "debug_nans", "check_tracer_leaks", "numpy_dtype_promotion")
OF_FRAMEWORKS = {"torch": of_torch, "jax": of_jax, "tensorflow": of_tensorflow, "keras": of_keras}


def changed(before, after):
    """Return what differs, in words. What a framework sets when it is imported is no difference."""
    imported = after.keys() - before.keys()
    names = [name for name in before if before[name] != after[name] and not (imported and name == "environment")]
    return [f"{name}: {before[name]} before, {after[name]} after" for name in names]
