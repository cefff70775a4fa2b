"""The batching operations of a framework, by its entry. A framework is imported when it is first asked for."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from gradclip._src.backends.entries import Entry
from gradclip._src.private.batching.verbs import Batching


def batching_of(framework: Entry, method: str) -> Batching:
    """Return the operations of a framework. `method="loop"` processes one example at a time, otherwise all at once."""
    return _OF[framework.module](method == "loop")


def laid_out(framework: Entry, tree: Any) -> AbstractContextManager[tuple[Any, Callable[[Any], Any]]]:
    """Return a context that gives arrays as they lie on devices in it, and what lays out results after it."""
    if framework.module != "jax":
        return nullcontext((tree, lambda results: results))
    from gradclip._src.backends.jax.placement import laid_out_by_xla

    return laid_out_by_xla(tree)


# Each function uses an import statement: `torch.compile` cannot trace any other kind of import.
def _torch(loop: bool) -> Batching:
    from gradclip._src.private.batching.torch import TorchBatching, TorchLoop

    return TorchLoop() if loop else TorchBatching()


def _jax(loop: bool) -> Batching:
    from gradclip._src.private.batching.jax import JaxBatching, JaxLoop

    return JaxLoop() if loop else JaxBatching()


def _tensorflow(loop: bool) -> Batching:
    from gradclip._src.private.batching.tensorflow import TensorFlowBatching, TensorFlowLoop

    return TensorFlowLoop() if loop else TensorFlowBatching()


_OF = {"torch": _torch, "jax": _jax, "tensorflow": _tensorflow}
