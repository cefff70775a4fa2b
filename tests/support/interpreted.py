"""Triton's kernels for GPUs, run by its interpreter on CPU tensors, which then stand for those of a device."""

import importlib
import os
import sys
from contextlib import contextmanager
from functools import cache
from unittest import mock

from gradclip._src.backends import gpu_switch
from gradclip._src.backends.torch import framework, launches

KERNELS = "gradclip._src.backends.torch.gpu_kernels"
ON = {gpu_switch.VARIABLE: "1", "TRITON_INTERPRET": "1"}
# The interpreter computes with NumPy, which warns of what GPUs do silently.
SILENT = "ignore:.*encountered in:RuntimeWarning"


@contextmanager
def switched(kept=None, **settings):
    """Import the kernels anew under these variables of the environment, or take those that were kept."""
    before = sys.modules.pop(KERNELS, None)
    if kept is not None:
        sys.modules[KERNELS] = kept
    with mock.patch.dict(os.environ, settings):
        _forget()
        try:
            yield
        finally:
            sys.modules.pop(KERNELS, None)
            if before is not None:
                sys.modules[KERNELS] = before
            _forget()


def _forget():
    launches._imported.cache_clear()
    gpu_switch.lacking.cache_clear()
    for kept in (launches._tables, launches._compiled):
        kept.clear()


@cache
def _kernels():
    """Import the kernels for the interpreter, which rewrites the functions of a module when it first runs them."""
    with switched(**ON):
        return importlib.import_module(KERNELS)


class Launched:
    """The names of launched kernels, and the bytes of gradients that they read and write."""

    def __init__(self):
        self.names = []
        self.read = self.written = 0


@contextmanager
def interpreted():
    """Let the interpreter run the kernels on CPU tensors; yield what was launched."""
    module = _kernels()
    with switched(module, **ON):
        builder = type(importlib.import_module("triton.runtime.interpreter").interpreter_builder)
        found, launch = Launched(), launches.launch
        load, store = builder.create_masked_load, builder.create_masked_store

        def launched(name, programs, *arguments):
            found.names += [name] * bool(programs)
            launch(name, programs, *arguments)

        def loaded(self, pointers, mask, *rest):
            got = load(self, pointers, mask, *rest)
            found.read += _bytes(mask, got)
            return got

        def stored(self, pointers, value, mask, *rest):
            found.written += _bytes(mask, value)
            return store(self, pointers, value, mask, *rest)

        with (
            mock.patch.object(framework, "in_host_memory", return_value=False),
            mock.patch.object(launches, "launch", launched),
            mock.patch.object(builder, "create_masked_load", loaded),
            mock.patch.object(builder, "create_masked_store", stored),
        ):
            found.module = module
            yield found


def _bytes(mask, values):
    """Return the bytes of gradients in a load or a store. Tables are read number by number, and sums are float64."""
    size = values.data.dtype.itemsize
    return int(mask.data.sum()) * size if mask.data.size > 1 and size < 8 else 0
