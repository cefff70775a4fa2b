"""The batching operations of a framework, by its entry. A framework is imported when it is first asked for."""

from collections.abc import Callable
from typing import Any

from gradclip._src.backends.entries import Entry
from gradclip._src.private.batching.verbs import Batching
from gradclip._src.tree import FlatTree


def batching_of(framework: Entry, method: str) -> Batching:
    """Return the operations of a framework. `method="loop"` processes one example at a time, otherwise all at once."""
    return _OF[framework.module](method == "loop")


def laid_out(framework: Entry, tree: Any, run: Callable[[Any], Any]) -> Any:
    """Return what `run` makes of a tree, whatever layout on devices JAX has been told for its arrays."""
    if framework.module != "jax":
        return run(tree)
    from gradclip._src.backends.jax.placement import laid_out_by_xla

    with laid_out_by_xla(tree) as (given, placed):
        results = run(given)
    return placed(results)


def check_hooks(framework: Entry, parameters: FlatTree) -> None:
    """Raise a ValueError for a parameter of PyTorch with hooks, which no call would run for an example."""
    if framework.module == "torch":
        from gradclip._src.private.batching.torch import check_hooks as check

        check(parameters)


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
