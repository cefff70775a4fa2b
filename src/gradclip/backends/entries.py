"""The frameworks, one entry each: how its arrays are told, where its folder is, and what errors say of it.

To add one, write its folder, whose front is a `gradclip.backends.framework.Framework`, and an entry here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradclip.backends.framework import Framework


@dataclass(frozen=True)
class Models:
    """How a framework's models are told, by an attribute, and what to pass in place of one."""

    attribute: str
    gradients: str
    parameters: str


@dataclass(frozen=True)
class Entry:
    """What is known of a framework before it is touched.

    Attributes:
        name: as users read it.
        module: what is imported wherever its arrays are; also the key of the entry.
        arrays: the types of its arrays, by their names in the module.
        load: imports the folder, and returns what it supplies.
        takes_numpy: whether NumPy's arrays beside its own count as its own.
        has_trees: whether it has functions on trees of its own.
        has_derivatives: whether it differentiates functions, and takes them over batches.
        from_numpy: what users call to convert an array of NumPy's.
        per_example: what users call to compute per-example gradients.
        models: how its models are told from its arrays; None where they cannot be.
        parameter: returns the type of arrays that have a `.grad` of their own; None where there is none.
        compiling: says whether it records this call to compile it; None where arrays show that.
        at_import: what is done as soon as somebody has imported it.
        outputs_first: whether its layers keep weights with their outputs along the first axis, not along the last.
    """

    name: str
    module: str
    arrays: tuple[str, ...]  # names, because the module may not have been imported yet
    load: "Callable[[], Framework]"
    takes_numpy: bool = False
    has_trees: bool = False
    has_derivatives: bool = False
    from_numpy: str | None = None
    per_example: str | None = None
    models: Models | None = None
    parameter: Callable[[Any], type] | None = None
    compiling: Callable[[Any], bool] | None = None
    at_import: Callable[[], None] | None = None
    outputs_first: bool = False


# Each imports by a statement: `torch.compile` traces no other import.
def _numpy() -> "Framework":
    from gradclip.backends.host.framework import NUMPY

    return NUMPY


def _torch() -> "Framework":
    from gradclip.backends.torch.framework import TORCH

    return TORCH


def _jax() -> "Framework":
    from gradclip.backends.jax.framework import JAX

    return JAX


def _tensorflow() -> "Framework":
    from gradclip.backends.tensorflow.framework import TENSORFLOW

    return TENSORFLOW


def _make_kernels_known_to_jax() -> None:
    # A compiled program may be read from a file. It names the kernels, and XLA must know them by then.
    from gradclip.backends.jax import ffi as jax_ffi

    jax_ffi.registered()


def _keep_autograph_out() -> None:
    # AutoGraph would rewrite each function of gradclip that `tf.function` records, which takes seconds. None needs it.
    from tensorflow.python.autograph.core import config

    config.CONVERSION_RULES = (config.DoNotConvert("gradclip"), *config.CONVERSION_RULES)


ENTRIES = (
    # "generic" is the type of NumPy's scalars, which its reductions return.
    Entry("NumPy", "numpy", ("ndarray", "generic"), _numpy),
    Entry(
        "PyTorch",
        "torch",
        ("Tensor",),
        _torch,
        has_derivatives=True,
        from_numpy="torch.from_numpy",
        per_example="torch.func.vmap",
        models=Models(
            "named_parameters",
            "the gradients, [p.grad for p in model.parameters()], or call gradclip.grad_norm.",
            "pass dict(model.named_parameters()), and compute with torch.func.functional_call(model, parameters, (x,)) "
            "in the loss.",
        ),
        # Functions of the module: it must not be imported to make this table.
        parameter=lambda torch: torch.nn.Parameter,
        compiling=lambda torch: torch.compiler.is_compiling(),
        outputs_first=True,
    ),
    Entry(
        "JAX",
        "jax",
        ("Array",),
        _jax,
        takes_numpy=True,  # JAX's own functions take them, too
        has_trees=True,
        has_derivatives=True,
        from_numpy="jax.numpy.asarray",
        per_example="jax.vmap(jax.grad(...))",
        at_import=_make_kernels_known_to_jax,
    ),
    Entry(
        "TensorFlow",
        "tensorflow",
        ("Tensor", "Variable", "IndexedSlices"),
        _tensorflow,
        has_trees=True,
        has_derivatives=True,
        from_numpy="tf.convert_to_tensor",
        per_example="tf.vectorized_map",
        at_import=_keep_autograph_out,
    ),
)
