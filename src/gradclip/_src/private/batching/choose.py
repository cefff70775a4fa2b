"""The batching operations of a framework, by its entry. A framework is imported when it is first asked for."""

from gradclip._src.backends.entries import Entry
from gradclip._src.private.batching.verbs import Batching


def batching_of(framework: Entry, method: str) -> Batching:
    """Return the operations of a framework. `method="loop"` processes one example at a time, otherwise all at once."""
    return _OF[framework.module](method == "loop")


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
