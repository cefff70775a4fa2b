"""`declearn.optimizer.modules`, on vectors of NumPy, PyTorch, JAX and TensorFlow."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from declearn.model.haiku import JaxNumpyVector
from declearn.model.sklearn import NumpyVector
from declearn.model.tensorflow import TensorflowVector
from declearn.model.torch import TorchVector
from declearn.optimizer import modules as peer

from gradclip.integrations import declearn as ours
from side_by_side.cases import CASES, FEW
from side_by_side.exact import Rule, each_leaf, together
from side_by_side.functions import Call, Function, Library, function
from side_by_side.libraries import pytorch
from side_by_side.libraries.jax_arrays import mode
from side_by_side.libraries.tensorflow_arrays import tf
from side_by_side.verdict import Answer

# Importing declearn's JAX vectors switches 64-bit mode on. JAX users have it off by default.
jax.config.update("jax_enable_x64", False)


class Kind(NamedTuple):
    vector: Callable[[dict[str, Any]], Any]
    array: Callable[[np.ndarray], Any]
    numpy: Callable[[Any], np.ndarray]
    formats: tuple[str, ...]


KINDS = {
    "NumPy": Kind(NumpyVector, np.copy, np.asarray, ("float32", "float16", "float64")),
    "PyTorch": Kind(TorchVector, pytorch.tensor, pytorch.array, ("float32", "bfloat16", "float16", "float64")),
    "TensorFlow": Kind(TensorflowVector, tf.constant, np.asarray, ("float32", "bfloat16", "float16", "float64")),
    "JAX": Kind(JaxNumpyVector, jnp.asarray, np.asarray, ("float32", "bfloat16", "float16", "float64")),
}


def run(name: str, kind: Kind) -> Callable[[Any], Call]:
    def of(module: Any) -> Call:
        def call(leaves: list[np.ndarray], threshold: float) -> Answer:
            with mode(leaves):
                vector = kind.vector({str(i): kind.array(x) for i, x in enumerate(leaves)})
                clipped = getattr(module, name)(threshold).run(vector).coefs
                return Answer([kind.numpy(clipped[str(i)]) for i in range(len(leaves))])

        return call

    return of


def _function(name: str, rule: Rule, of: str) -> Function:
    kind, cases = KINDS[of], tuple(CASES) if of == "NumPy" else FEW
    return function(f"{name} ({of})", run(name, kind), peer, ours, rule, cases=cases, formats=kind.formats)


LIBRARY = Library(
    "declearn",
    version("declearn"),
    [
        _function(name, rule, of)
        for name, rule in (("L2GlobalClipping", Rule(together)), ("L2Clipping", Rule(each_leaf)))
        for of in KINDS
    ],
)
