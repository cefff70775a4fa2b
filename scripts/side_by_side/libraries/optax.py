"""`optax`: its transformations, and its sums over examples."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradclip.integrations import optax as ours
from side_by_side.cases import FEW, SUMS
from side_by_side.exact import (
    Clamp,
    Rule,
    Summed,
    columns,
    equal_shares,
    root_mean_square,
    shares_by_size,
    together,
)
from side_by_side.functions import Call, Function, Library, function
from side_by_side.libraries.jax_arrays import on_arrays


def transformation(name: str, jit: bool = False) -> Any:
    """Return a call of a transformation that takes a threshold."""

    def of(module: Any) -> Call:
        def clip(leaves: list[jax.Array], threshold: float) -> tuple[Any, list[Any]]:
            made = getattr(module, name)(threshold)
            update = jax.jit(made.update) if jit else made.update
            return update(leaves, made.init(leaves))[0], []

        return on_arrays(clip)

    return of


def adaptive_grad_clip(module: Any) -> Call:
    """Return a call with parameters that are all 1."""

    def clip(leaves: list[jax.Array], threshold: float) -> tuple[Any, list[Any]]:
        made, parameters = module.adaptive_grad_clip(threshold), jax.tree.map(jnp.ones_like, leaves)
        return made.update(leaves, made.init(parameters), parameters)[0], []

    return on_arrays(clip)


def over_examples(name: str, **options: Any) -> Any:
    def of(module: Any) -> Call:
        return on_arrays(lambda leaves, threshold: (getattr(module, name)(leaves, threshold, **options)[0], []))

    return of


def _layer_norm_clip(uniform: bool, rule: Rule) -> Function:
    name = "per_example_layer_norm_clip"
    title = name if uniform else f"{name} (by size)"
    return function(title, over_examples(name, uniform=uniform), optax, ours, Summed(rule), cases=SUMS)


LIBRARY = Library(
    "optax",
    optax.__version__,
    [
        function("clip_by_global_norm", transformation("clip_by_global_norm"), optax, ours, Rule(together)),
        function(
            "clip_by_global_norm (jitted)",
            transformation("clip_by_global_norm", jit=True),
            optax,
            ours,
            Rule(together),
            cases=FEW,
            formats=(),
        ),
        function("clip", transformation("clip"), optax, ours, Clamp()),
        function("clip_by_block_rms", transformation("clip_by_block_rms"), optax, ours, Rule(root_mean_square)),
        function("adaptive_grad_clip", adaptive_grad_clip, optax, ours, Rule(columns)),
        function(
            "per_example_global_norm_clip",
            over_examples("per_example_global_norm_clip"),
            optax,
            ours,
            Summed(Rule(together)),
            cases=SUMS,
        ),
        _layer_norm_clip(True, Rule(equal_shares)),
        _layer_norm_clip(False, Rule(shares_by_size)),
    ],
    compiles=True,
)
