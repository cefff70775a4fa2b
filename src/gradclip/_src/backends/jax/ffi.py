"""Calls of the kernels in XLA's programs for the CPU of this process, and XLA's own operations in all other programs.

JAX decides where a program runs after tracing it: here, on other devices, or, if `jax.export` writes it to a file, in a
process that may not have the kernels. Therefore `jax.export` refuses programs that call them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from gradclip._src import native

# The versions of XLA's interface that are known to accept the kernels. They are written for version 0.2.
_ACCEPTING = ("0.2", "0.3")

_TARGETS = ("power_sums", "add_examples", "extremes", "entries", "outer_sums", "gram_squares")


def usable(leaves: Sequence[Any]) -> bool:
    """Say whether traced calls can use the kernels.

    They can if there is one CPU device and all sizes are known. With several devices, XLA would gather the arrays.
    Symbolic sizes mean that a program is being exported, and the calls need sizes.
    """
    return (
        jax.default_backend() == "cpu"
        and jax.device_count() == 1
        and all(isinstance(length, int) for leaf in leaves for length in np.shape(leaf))
        and registered()
    )


def register_at_import() -> None:
    """Register the kernels with XLA before it starts, if it is known to accept them.

    Until XLA starts, it keeps a refusal to itself, and then does not start at all. Later, a refusal is an exception.
    """
    if _interface() in _ACCEPTING:
        registered()


def _interface() -> str:
    """Return the version of XLA's interface from its header; an empty string if there is none."""
    try:
        header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text(encoding="utf-8")
    except (AttributeError, OSError):  # jax.ffi may not exist
        return ""
    return ".".join(re.findall(r"^#define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)", header, re.MULTILINE))


@cache
def registered() -> bool:
    """Register the kernels with XLA, which must have started, unless it is known to accept them.

    Return whether that worked.
    """
    if native.kernels is None:
        return False
    try:
        for name in _TARGETS:
            jax.ffi.register_ffi_target(f"gradclip_{name}", getattr(native.kernels, f"xla_{name}")(), platform="cpu")
    except (AttributeError, RuntimeError):  # this JAX has no such interface, or a different version
        return False
    return True


@dataclass(frozen=True)
class Kernel:
    """A kernel that is registered with XLA: its attributes, the types of its results, and what `vmap` makes of it.

    `vmap` adds leading axes to the results and to the arrays: of length 1 to arrays that are not mapped ("expand"), or
    of the full length to all ("broadcast"). Or it calls the kernel in a loop. `portable` computes the results in XLA's
    operations, from the arrays, the shape of the first result, and the attributes.
    """

    target: str
    results: tuple[jax.ShapeDtypeStruct, ...]
    portable: Callable[..., Sequence[jax.Array]]
    vmap: Literal["expand", "broadcast", "loop"]
    attributes: tuple[tuple[str, Any], ...] = ()

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        found: list[jax.Array] = _kernel.bind(*arrays, kernel=self)
        return found

    def mapped(self, count: int) -> Kernel:
        """Return the kernel that returns one more leading axis of this length."""
        results = tuple(jax.ShapeDtypeStruct((count, *one.shape), one.dtype) for one in self.results)
        return replace(self, results=results)


# Equal kernels share a program, so the calls outside traced code compile once.
_compiled = jax.jit(Kernel.__call__, static_argnums=0)

_kernel = Primitive("gradclip_kernel")
_kernel.multiple_results = True


@_kernel.def_impl
def _(*arrays: jax.Array, kernel: Kernel) -> Any:
    # The call is a program of its own, also where the user has disabled `jax.jit`.
    with jax.disable_jit(False):
        return _compiled(kernel, arrays)


@_kernel.def_abstract_eval
def _(*kinds: Any, kernel: Kernel) -> Any:
    mesh = jax.sharding.get_abstract_mesh()
    whole = None if mesh.empty else NamedSharding(mesh, PartitionSpec())
    return [jax.core.ShapedArray(one.shape, one.dtype, sharding=whole) for one in kernel.results]


def _mapped(arrays: Sequence[Any], axes: Sequence[Any], *, kernel: Kernel) -> Any:
    own = [axis if isinstance(axis, int) else None for axis in axes]
    rows = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(arrays, own, strict=True)]
    count = next(len(x) for x, axis in zip(rows, own, strict=True) if axis is not None)

    def row(taken: list[jax.Array]) -> list[jax.Array]:
        left = iter(taken)
        return kernel([x if axis is None else next(left) for x, axis in zip(rows, own, strict=True)])

    if kernel.vmap == "loop":
        found = lax.map(row, [x for x, axis in zip(rows, own, strict=True) if axis is not None])
    else:
        length = count if kernel.vmap == "broadcast" else 1
        alike = [lax.broadcast(x, (length,)) if axis is None else x for x, axis in zip(rows, own, strict=True)]
        found = kernel.mapped(count)(alike)
    return found, [0] * len(found)


def _lowered(ctx: mlir.LoweringRuleContext, *operands: Any, kernel: Kernel) -> Sequence[Any]:
    program, attributes = ctx.module_context, dict(kernel.attributes)
    if tuple(program.platforms) == ("cpu",) and not program.lowering_parameters.for_export:
        return jax.ffi.ffi_lowering(kernel.target)(ctx, *operands, **attributes)

    def portable(*arrays: jax.Array) -> Sequence[jax.Array]:
        return kernel.portable(arrays, kernel.results[0].shape, **attributes)

    # JAX writes the program outside the call, where 64-bit mode may be off and promotion forbidden.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        traced = jax.make_jaxpr(portable)(*ctx.avals_in)
    found: Sequence[Any] = mlir.lower_fun(jaxpr_as_fun(traced), multiple_results=True)(ctx, *operands)
    return found


batching.primitive_batchers[_kernel] = _mapped
mlir.register_lowering(_kernel, _lowered)
