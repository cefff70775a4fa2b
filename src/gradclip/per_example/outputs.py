"""What calls on a batch return for single examples."""

from typing import Any, NamedTuple

from gradclip.typing import Scalar


class PerExampleInfo(NamedTuple):
    """How many examples were clipped, and the norm of each.

    Attributes:
        num_clipped: the number of examples with a norm above their threshold, an integer scalar.
        norms: the norm of each example before clipping, shape (batch,), float64 if a gradient is
            float64, else float32.

    With `per_layer`, both are trees with the structure of the gradients. With a tree of thresholds, they have the
    structure of that tree.

    Both reveal single examples. The noise on the sum does not protect them: add separate noise before you publish
    them or choose thresholds from them.
    """

    num_clipped: Scalar
    norms: Scalar


class ExampleOutputs(NamedTuple):
    """Outputs for each example, with the batch on axis 0 of each leaf; None for those you did not ask for.

    Attributes:
        values: what the function returned.
        norms: the norm before clipping.
        aux: the function's second result.

    All of them reveal single examples. The noise on the sum does not protect them.
    """

    values: Any = None
    norms: Any = None
    aux: Any = None
