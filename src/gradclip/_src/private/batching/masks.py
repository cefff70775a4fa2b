"""Models of transformers under `vmap`: what they would read of a padding mask, no example alone can say."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import _functorch


@dataclass(eq=False)
class _UnknownValues:
    """What transformers asks of a tensor before it reads a mask: whether its values are unknown, as under `vmap`."""

    asked: Callable[[object], bool]
    calls: int = 0

    def __call__(self, x: object) -> bool:
        if isinstance(x, torch.Tensor) and not torch.compiler.is_compiling():
            while _functorch.is_functorch_wrapped_tensor(x) and not _functorch.is_batchedtensor(x):
                x = _functorch.get_unwrapped(x)
            return _functorch.is_batchedtensor(x) or self.asked(x)
        return self.asked(x)


_entering = threading.Lock()


@contextmanager
def masks_unread(library: Any) -> Iterator[None]:
    """Within it, transformers builds the attention mask of every example, without a look at what padding there is.

    Pass its module `utils.import_utils`. The last of the threads that are in it leaves transformers as it was.
    """
    if not hasattr(library, "is_jax_jitting"):
        yield
        return
    with _entering:
        if not isinstance(library.is_jax_jitting, _UnknownValues):
            library.is_jax_jitting = _UnknownValues(library.is_jax_jitting)
        own: _UnknownValues = library.is_jax_jitting
        own.calls += 1
    try:
        yield
    finally:
        with _entering:
            own.calls -= 1
            if not own.calls and library.is_jax_jitting is own:
                library.is_jax_jitting = own.asked
