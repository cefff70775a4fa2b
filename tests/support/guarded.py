"""Run an example with a guard of each optimizer of PyTorch: `python guarded.py MAX_NORM EXAMPLE ARGUMENTS`.

A mistake that a guard finds is an error. At the end it prints how often the guards have looked.
"""

import functools
import runpy
import sys
import warnings

import torch

import gradclip

MADE = []


def guarded(initialize, max_norm):
    """Return a function that makes an optimizer, and a guard of it."""

    @functools.wraps(initialize)
    def made(self, *args, **kwargs):
        initialize(self, *args, **kwargs)
        MADE.append(gradclip.guard(self, max_norm, every=5))

    return made


def main(max_norm, script, *arguments):
    """Run a script so."""
    warnings.simplefilter("error", gradclip.ClippingWarning)
    torch.optim.Optimizer.__init__ = guarded(torch.optim.Optimizer.__init__, float(max_norm))
    sys.argv = [script, *arguments]
    sys.path.insert(0, script.rpartition("/")[0])
    runpy.run_path(script, run_name="__main__")
    assert not any(one.reports for one in MADE)
    print(f"\nguards looked {sum(one.looks for one in MADE)} times")


if __name__ == "__main__":
    main(*sys.argv[1:])
