"""Drop-in replacements for the clipping modules of `declearn.optimizer.modules`.

To switch, import this module. declearn's registry then builds these classes for the names `l2-global-clipping` and
`l2-clipping`. `Optimizer(lrate, modules=["l2-global-clipping"])` and saved configurations use them without changes.
They are subclasses of declearn's classes. Vectors may hold arrays of NumPy, PyTorch, JAX or TensorFlow, including
TensorFlow's sparse gradients.
"""

from typing import Any

from gradclip._src.backends.imported import needed_for
from gradclip._src.functional.clip import clip_by_global_norm, clip_by_layer_norm
from gradclip._src.passed.arguments import check_threshold
from gradclip._src.passed.leaves import as_floats

with needed_for("declearn"):
    from declearn.model.api import Vector
    from declearn.optimizer import modules
    from declearn.utils import _register

__all__ = ["L2Clipping", "L2GlobalClipping"]


class L2GlobalClipping(modules.L2GlobalClipping, register=False):  # type: ignore[call-arg]
    """Clip all arrays of a Vector together. Their global L2 norm never exceeds `max_norm`, even by rounding.

    Args:
        max_norm: the threshold, >= 0, in the units of the gradients.

    The name, configuration and interface are those of declearn 2.9.

    >>> from declearn.model.sklearn import NumpyVector
    >>> import numpy as np
    >>> grads = NumpyVector({"w": np.array([3.0, 4.0])})
    >>> clipped = L2GlobalClipping(max_norm=1.0).run(grads)
    >>> clipped.coefs["w"].round(6).tolist()
    [0.6, 0.8]
    """

    def __init__(self, max_norm: float = 1.0) -> None:
        check_threshold(max_norm)
        super().__init__(max_norm)

    def run(self, gradients: Vector) -> Vector:
        """Return the clipped Vector. An empty Vector is returned unchanged."""
        if not gradients.coefs:
            return gradients
        return _rebuilt(gradients, clip_by_global_norm(as_floats(gradients.coefs), self.max_norm)[0])


class L2Clipping(modules.L2Clipping, register=False):  # type: ignore[call-arg]
    """Clip each array of a Vector by its own L2 norm, which never exceeds `max_norm`, even by rounding.

    Args:
        max_norm: the threshold for each array, >= 0, in the units of the gradients.

    The name, configuration and interface are those of declearn 2.9.
    """

    def __init__(self, max_norm: float = 1.0) -> None:
        check_threshold(max_norm)
        super().__init__(max_norm)

    def run(self, gradients: Vector) -> Vector:
        """Return the clipped Vector."""
        return _rebuilt(gradients, clip_by_layer_norm(as_floats(gradients.coefs), self.max_norm)[0])


def _rebuilt(gradients: Vector, coefs: dict[str, Any]) -> Vector:
    """Return a Vector of the same type, with its arrays in the same order."""
    return type(gradients)({name: coefs[name] for name in gradients.coefs})


def _take_names(*classes: type[modules.OptiModule]) -> None:
    """Register the classes under their names in declearn's registry, which has no public call to replace an entry."""
    for cls in classes:
        _register.REGISTRIES["OptiModule"].register(cls, cls.name, repl=True)


_take_names(L2GlobalClipping, L2Clipping)
