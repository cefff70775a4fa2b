"""What a function of one example returns, and the outputs of a batch."""

from typing import Any, NamedTuple

from gradclip.backends.imported import exportable
from gradclip.per_example.batching.verbs import mapped


@exportable
class ExampleOutputs(NamedTuple):
    """Outputs for each example, with the batch on axis 0 of each leaf; None for those you did not ask for.

    Attributes:
        values: what the function returned.
        norms: the norm before clipping. For a tree of thresholds, a tree of its structure.
        aux: the function's second result.

    All of them reveal single examples. The noise on the sum does not protect them.
    """

    values: Any = None
    norms: Any = None
    aux: Any = None


def value_and_aux(result: Any, *, has_aux: bool, keep_batch_dim: bool) -> tuple[Any, Any]:
    """Return the value and the auxiliary result of one example, the latter without a batch axis that was kept.

    Raises TypeError if there should be two results and are not.
    """
    if has_aux and not (isinstance(result, tuple | list) and len(result) == 2):
        raise TypeError(f"with has_aux=True fun must return a pair, (value, aux), got a {type(result).__name__}.")
    value, aux = result if has_aux else (result, ())
    return value, mapped(_without_batch_axis, aux) if keep_batch_dim else aux


def _without_batch_axis(x: object) -> Any:
    return x[0] if getattr(x, "shape", ())[:1] == (1,) else x  # type: ignore[index]
