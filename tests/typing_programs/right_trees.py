"""Programs for trees of NumPy and JAX that type checkers must accept, with the types that they must tell."""

from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar, assert_type

import jax
import jax.numpy as jnp
import numpy as np

import gradclip
from gradclip import clip_by_global_norm
from gradclip.typing import AxisName, Scalar, Thresholds, Where

Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
T = TypeVar("T")


class Layer(NamedTuple):
    w: Array
    b: Array


@dataclass
class Limits:
    w: float
    b: float


def a_dict(grads: dict[str, Array]) -> dict[str, Array]:
    clipped, norm = gradclip.clip_by_global_norm(grads, 1.0)
    assert_type(clipped, dict[str, Array])
    assert_type(norm, np.floating[Any])
    return clipped


def numbers(grad: Array) -> None:
    gradclip.clip_by_global_norm(grad, np.float32(1), nonfinite="raise")
    gradclip.clip_by_global_norm(grad, Fraction(1, 3))
    gradclip.clip_by_global_norm(grad, Decimal("0.5"), ord=None)
    gradclip.clip_by_global_norm(grad, np.array(1.0), ord="-inf")
    assert_type(gradclip.norm_at_most(grad, 1), bool)


def a_tuple(one: Array) -> None:
    clipped = gradclip.clip_by_global_norm((one, [one]), 1.0, axis_name=("a", "b"))[0]
    assert_type(clipped, tuple[Array, list[Array]])
    gradclip.per_example_clip(one, 1.0, mask=one > 0, sum_dtype=np.dtype("float64"))


def named_tuple(layer: Layer) -> Layer:
    return gradclip.clip_by_global_norm(layer, 1.0)[0]


def nested(tree: dict[str, list[Layer]]) -> dict[str, list[Layer]]:
    return gradclip.clip_by_value(tree, 1.0)


def whatever(tree: T) -> T:
    return gradclip.clip_by_layer_norm(tree, 1.0)[0]


def layers(tree: dict[str, Array], layer: Layer) -> None:
    gradclip.clip_by_layer_norm(tree, {"w": 1.0, "b": None})
    gradclip.clip_by_layer_norm(layer, Layer(np.ones((), np.float32), np.ones((), np.float32)))
    gradclip.clip_by_layer_norm(layer, Limits(1.0, 2.0))
    gradclip.layer_norms(tree, prefix={"w": 0, "b": 0})


def passed_on(tree: dict[str, Array], max_norm: Thresholds, where: Where) -> dict[str, Array]:
    return gradclip.clip_by_layer_norm(tree, max_norm, where=where)[0]


def units(tree: dict[str, Array], params: dict[str, Array]) -> dict[str, Array]:
    gradclip.clip_by_unit_norm(tree, 1.0, unit_axis=(0, 1))
    return gradclip.adaptive_grad_clip(tree, params, clipping=0.01)[0]


def chosen(tree: dict[str, Array]) -> np.floating[Any]:
    return gradclip.global_norm(tree, where=lambda name: name.startswith("w"))


def in_place(tree: dict[str, Array]) -> np.floating[Any]:
    gradclip.clip_grad_layer_norm_(tree, {"w": 1.0, "b": 2.0})
    return gradclip.clip_grad_norm_(tree, 6.5)


def in_jax(grads: dict[str, jax.Array], axis: AxisName) -> jax.Array:
    clipped, norm = clip_by_global_norm(grads, 1.0, axis_name=axis)
    assert_type(clipped, dict[str, jax.Array])
    assert_type(norm, jax.Array)
    return gradclip.global_norm(clipped["w"])


def compiled(grads: jax.Array) -> jax.Array:
    clip = jax.jit(lambda tree: gradclip.clip_by_global_norm(tree, jnp.float32(1))[0])
    return jnp.asarray(clip(grads))


def in_optax() -> None:
    from gradclip.integrations.optax import clip_by_global_norm

    clip_by_global_norm(1.0)


def part_by_part(parts: list[dict[str, Array]]) -> Scalar:
    whole = gradclip.partial_norm(parts[0]) + gradclip.partial_norm(parts[1])
    assert_type(whole, gradclip.PartialNorm)
    assert_type(whole.clip(parts[0], 1.0), dict[str, Array])
    return whole.norm


def a_client(update: dict[str, Array], template: dict[str, Array]) -> str:
    verdict = gradclip.check_update(update, 6.5, like=template)
    assert_type(verdict.ok, bool)
    return verdict.reason


def kernels() -> gradclip.NativeStatus:
    return gradclip.native_status()
