"""Checkpointing: modules are run again in the backward pass, with the parameters of the forward pass.

By then `functional_call` has put the module's own parameters back. They stand in the same memory as the ones passed,
or else an error is raised, and are replaced by these. The operations are then the same as in the forward pass.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from gradclip._src.private.ghost.torch.parameter import Arguments, Keywords, Operation, TappedParameter, replaced
from gradclip._src.private.ghost.torch.run import ForwardPass
from gradclip._src.private.ghost.torch.vmap import hooks_are_set, memory_of


class Again(TorchFunctionMode):
    """Within it, parameters are replaced by those in `given` that share their memory, and no use of them is kept."""

    def __init__(self, run: ForwardPass, given: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self.run, self.given = run, given

    def __enter__(self) -> Again:
        self.run.recording = False
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.run.recording = True
        super().__exit__(*error)

    def __torch_function__(
        self, func: Operation, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        return func(*self._with_given(tuple(args)), **self._with_given(kwargs or {}))

    def _with_given(self, x: object) -> Any:
        return replaced(x, lambda own: self.given.get(own.data_ptr(), own), torch.nn.Parameter)


@contextmanager
def same_parameters(run: ForwardPass) -> Iterator[None]:
    """Raise a RuntimeError if a module is run again in the backward pass with parameters of other memory."""
    used: dict[torch.nn.Module, list[int]] = {}
    thread = threading.get_ident()

    def look(module: torch.nn.Module, inputs: tuple[object, ...]) -> None:
        # Hooks are global: another thread may be running another model.
        if threading.get_ident() != thread or not (hooks_are_set() or not run.recording):
            return
        memory = [_memory(x) for x in module._parameters.values() if x is not None]
        if not run.recording and used.get(module, memory) != memory:
            raise RuntimeError(
                f"checkpointing computes {type(module).__name__} again with the module's own parameters, which are not "
                "the parameters passed. Pass dict(model.named_parameters()), or load yours into the model first."
            )
        used[module] = memory

    handle = register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()


def _memory(x: torch.Tensor) -> int:
    # Otherwise `Again` would replace parameters here as well.
    with torch._C.DisableTorchFunction():
        return memory_of(x.tap.weight if type(x) is TappedParameter else x)
