"""Keras optimizers. A step of SGD from zero shows the clipped gradient."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from gradclip.integrations import keras as integration
from side_by_side.cases import CASES
from side_by_side.exact import Clamp, Rule, each_leaf, together
from side_by_side.functions import Call, Function, Library
from side_by_side.verdict import Answer

# The step itself reads subnormal numbers as zero, whatever clipping returns.
WITHOUT_SUBNORMALS = tuple(name for name in CASES if not name.startswith("subnormal"))
SGD, CLIPPED = keras.optimizers.SGD, integration.clipped(keras.optimizers.SGD)


def step(optimizer: Callable[[float], Any]) -> Call:
    """Return a call that makes an optimizer for the threshold and takes one step."""

    def call(leaves: list[np.ndarray], threshold: float) -> Answer:
        variables = [keras.Variable(np.zeros(x.shape), dtype=x.dtype.name) for x in leaves]
        optimizer(threshold).apply([ops.convert_to_tensor(x) for x in leaves], variables)
        return Answer([-ops.convert_to_numpy(v.value) for v in variables])

    return call


def _function(name: str, scope: str, rule: Rule | Clamp) -> Function:
    theirs = lambda threshold: SGD(learning_rate=1.0, **{name: threshold})
    ours = lambda threshold: CLIPPED(learning_rate=1.0, max_norm=threshold, scope=scope)
    return Function(f"{name} ({scope})", step(theirs), step(ours), rule, WITHOUT_SUBNORMALS)


LIBRARY = Library(
    "Keras",
    keras.__version__,
    [
        _function("global_clipnorm", "global", Rule(together)),
        _function("clipnorm", "variable", Rule(each_leaf)),
        _function("clipvalue", "value", Clamp()),
    ],
    compiles=True,
)
