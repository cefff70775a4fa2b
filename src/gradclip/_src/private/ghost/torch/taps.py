"""Gradients of a batch in factors, for PyTorch: one run under `torch.func.vmap`, with ordinary autograd outside."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from gradclip._src.backends.torch.tensors import tensor_of
from gradclip._src.private.batching.torch import TorchGradient, batch_norm_named, explained
from gradclip._src.private.batching.verbs import Args, Axes, Function, mapped, mapped_args
from gradclip._src.private.ghost.plan import Autograd
from gradclip._src.private.ghost.records import LeafUses, Tapped, Use
from gradclip._src.private.ghost.taps import Argnums, NotInFactorsError, Taps
from gradclip._src.private.ghost.torch import convolutions, parameter, products
from gradclip._src.private.ghost.torch.both_passes import HIDDEN, BatchedCall, Pass, gradient_of
from gradclip._src.private.ghost.torch.run import Leaf, available, current_level, overlap
from gradclip._src.tree import flatten

OPERATIONS = (convolutions, products, parameter)
"""The modules whose handlers know operations."""


class TorchTaps(Taps):
    """`Taps` for PyTorch."""

    autograd = Autograd(addition=70.0, convolution=4.0, alone=True, calls=8e7)
    runs_more = True

    def prevented(self) -> str:
        if torch.compiler.is_compiling():
            return "torch.compile traces the call"
        if not available():
            return "this version of PyTorch lacks what taps need"
        if torch._guards.detect_fake_mode() is not None:
            return "the tensors are fake"
        return "" if current_level() is None else "the call is inside a transform of torch.func"

    def uses(self, fun: Function, argnums: Argnums, args: Args, axes: Axes) -> list[LeafUses]:
        with _unnoticed(args):
            one = BatchedCall(fun, argnums, mapped_args(lambda x: tensor_of(x)[:1], args, axes), axes)
            try:
                return _uses_of(one)
            except NotInFactorsError as error:
                reason = f"{error}, and factors do not run hooks"
            except Exception as error:
                # The caller then takes another way, on which the same error is raised and explained.
                first = str(error).strip().partition("\n")[0][:200]
                reason = f"the function fails under torch.func.vmap ({first})"
        return [_described(one, i, reason=reason) for i in range(len(one.parameters))]

    def run(
        self,
        fun: Function,
        argnums: Argnums,
        args: Args,
        axes: Axes,
        tapped: Sequence[bool],
        made_soon: Sequence[bool] = (),
    ) -> Tapped:
        with batch_norm_named():
            try:
                return _run(BatchedCall(fun, argnums, args, axes), tapped, made_soon or [False] * len(tapped))
            except NotInFactorsError:
                raise
            except Exception as error:
                better = explained(error, TorchGradient(fun, argnums), args, axes)
                if better is error:
                    raise
                raise better from error


def _run(call: BatchedCall, tapped: Sequence[bool], made_soon: Sequence[bool]) -> Tapped:
    done, reasons, _ = _finished(call, tapped)
    pairs = zip(done.leaves, made_soon, strict=True)
    gradients = [gradient_of(leaf, done.cotangents, made_soon=soon) for leaf, soon in pairs]
    reasons |= {i: leaf.reason for i, leaf in enumerate(done.leaves) if leaf.reason}
    done.close()
    untapped = {i: reason for i, reason in sorted(reasons.items()) if tapped[i]}
    return Tapped(gradients, done.values.detach(), mapped(torch.Tensor.detach, done.aux), untapped)


def _uses_of(call: BatchedCall) -> list[LeafUses]:
    done, reasons, added = _finished(call, [x.dim() > 0 for x in call.parameters])
    found = [_described(call, i, leaf, reasons.get(i, "")) for i, leaf in enumerate(done.leaves)]
    found = [replace(one, added=i in added) for i, one in enumerate(found)]
    if done.run.hooked or done.run.only_tapped:
        found = [replace(one, only_tapped=True) for one in found]
    done.close()
    return found


def _finished(call: BatchedCall, tapped: Sequence[bool]) -> tuple[Pass, dict[int, str], set[int]]:
    """Return a run of a function, why parameters could not be tapped, and which are only added to values."""
    reasons = {i: reason for i, reason in enumerate(call.refused()) if reason}
    hidden: set[int] = set()
    added: set[int] = set()
    while True:
        flags = [flag and i not in reasons for i, flag in enumerate(tapped)]
        # One-dimensional parameters are mostly biases of products, whose gradients need no copies.
        one_axis = [x.dim() == 1 and i not in hidden for i, x in enumerate(call.parameters)]
        done = Pass(call, flags, [not (flag or bias) for flag, bias in zip(flags, one_axis, strict=True)])
        reasons |= {i: leaf.reason for i, leaf in enumerate(done.leaves) if leaf.reason}
        reasons |= dict.fromkeys(done.hidden, HIDDEN)
        added = (added | {i for i, leaf in enumerate(done.leaves) if leaf.only_added}) - {*done.hidden}
        if not (done.hidden or done.unfinished):
            return done, reasons, added
        hidden |= {*done.hidden}
        done.close()


def _described(call: BatchedCall, index: int, leaf: Leaf | None = None, reason: str = "") -> LeafUses:
    parameter = call.parameters[index]
    uses: tuple[Use, ...] = ()
    if leaf is not None:
        uses = tuple(Use(x.place, x.positions, x.embedding, x.operation) for x in leaf.terms if x.place is not None)
        reason = reason or leaf.reason or overlap(list({use.place: None for use in uses}))
        uses = () if reason else uses
    dtype = str(getattr(parameter, "dtype", type(parameter).__name__)).removeprefix("torch.")
    return LeafUses(call.paths()[index], tuple(getattr(parameter, "shape", ())), dtype, uses, reason)


@contextmanager
def _unnoticed(args: Args) -> Iterator[None]:
    """Leave the random numbers as they are, and give no warnings."""
    tensors = [x for arg in args for x in flatten(arg).leaves if isinstance(x, torch.Tensor)]
    devices = sorted({x.get_device() for x in tensors if x.is_cuda})
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
