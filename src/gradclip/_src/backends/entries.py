"""One entry for each framework: how to recognize its arrays, how to load its folder, and the words for errors.

To add a framework, write its folder, with a `Framework` (`backends/framework.py`) as its front, and add an entry
here.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradclip._src.backends.framework import Framework


@dataclass(frozen=True)
class Models:
    """The attribute that identifies a framework's models, and what errors tell users to pass instead of a model."""

    attribute: str
    gradients: str
    parameters: str


@dataclass(frozen=True)
class Entry:
    """What is known about a framework before its folder is imported.

    Attributes:
        name: the name that users read.
        module: the module that is imported whenever its arrays exist; also the key of the entry.
        arrays: the names of its array types in the module.
        load: imports the folder and returns the `Framework`.
        takes_numpy: whether NumPy arrays mixed with its own count as its own.
        has_trees: whether it has its own tree functions.
        has_derivatives: whether it can differentiate functions and map them over batches.
        from_numpy: the function that converts a NumPy array, for errors.
        per_example: the function that computes per-example gradients, for errors.
        models: how to recognize its models; None if they cannot be recognized.
        parameter: returns the array type with a `.grad` attribute; None if there is none.
        compiling: says whether the framework is tracing this call to compile it; None if its arrays show that.
        recording: says whether the framework records operations here, also of arrays that do not show that.
        at_import: what to run as soon as the framework is imported.
        outputs_first: whether its layers store weights with the outputs along the first axis, not the last.
    """

    name: str
    module: str
    arrays: tuple[str, ...]  # names, because the module may not be imported yet
    load: "Callable[[], Framework]"
    takes_numpy: bool = False
    has_trees: bool = False
    has_derivatives: bool = False
    from_numpy: str | None = None
    per_example: str | None = None
    models: Models | None = None
    parameter: Callable[[Any], type] | None = None
    compiling: Callable[[Any], bool] | None = None
    recording: Callable[[Any], bool] | None = None
    at_import: Callable[[], None] | None = None
    outputs_first: bool = False


# Each function uses an import statement: `torch.compile` cannot trace any other kind of import.
def _numpy() -> "Framework":
    from gradclip._src.backends.host.backend import NUMPY

    return NUMPY


def _torch() -> "Framework":
    from gradclip._src.backends.torch.framework import TORCH

    return TORCH


def _jax() -> "Framework":
    from gradclip._src.backends.jax.framework import JAX

    return JAX


def _tensorflow() -> "Framework":
    from gradclip._src.backends.tensorflow.framework import TENSORFLOW

    return TENSORFLOW


def _mlx() -> "Framework":
    from gradclip._src.backends.mlx.framework import MLX

    return MLX


def _make_kernels_known_to_jax() -> None:
    # A compiled program loaded from a file refers to the kernels by name, so XLA must know them before it runs.
    from gradclip._src.backends.jax import ffi as jax_ffi

    jax_ffi.register_at_import()


def _keep_autograph_out() -> None:
    # AutoGraph would rewrite every gradclip function that `tf.function` traces. That takes seconds and is not needed.
    # The module is not public. Without it, `import tensorflow` must still succeed.
    with suppress(ImportError, AttributeError):
        from tensorflow.python.autograph.core import config

        config.CONVERSION_RULES = (config.DoNotConvert("gradclip"), *config.CONVERSION_RULES)


def _torch_records(torch: Any) -> bool:
    vmapped = torch._C._functorch.maybe_current_level() is not None
    traced = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    return vmapped or traced or torch.jit.is_tracing()


def _jax_records(jax: Any) -> bool:
    from jax.extend import core

    # Without an operation: the first one takes hold of the devices. Before JAX 0.10 this was in jax.core.
    home = core if hasattr(core, "find_top_trace") else jax.core
    return type(home.find_top_trace(())).__name__ != "EvalTrace"


ENTRIES = (
    # "generic" is the type of NumPy scalars, which reductions return.
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
            "the gradients: [p.grad for p in model.parameters()], or call gradclip.grad_norm.",
            "pass dict(model.named_parameters()), and call torch.func.functional_call(model, parameters, (x,)) "
            "in the loss.",
        ),
        # Functions of the module, because this table must not import it.
        parameter=lambda torch: torch.nn.Parameter,
        compiling=lambda torch: torch.compiler.is_compiling(),
        recording=_torch_records,
        outputs_first=True,
    ),
    Entry(
        "JAX",
        "jax",
        ("Array",),
        _jax,
        takes_numpy=True,  # JAX's own functions accept them too
        has_trees=True,
        has_derivatives=True,
        from_numpy="jax.numpy.asarray",
        per_example="jax.vmap(jax.grad(...))",
        recording=_jax_records,
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
        recording=lambda tensorflow: tensorflow.inside_function(),
        at_import=_keep_autograph_out,
    ),
    Entry(
        "MLX",
        "mlx.core",
        ("array",),
        _mlx,
        per_example="mx.vmap(mx.grad(...))",
        models=Models(
            "trainable_parameters",
            "the gradients that mlx.nn.value_and_grad(model, loss) returns beside the loss.",
            "use PyTorch, JAX or TensorFlow. gradclip cannot differentiate functions of MLX.",
        ),
        outputs_first=True,
    ),
)
