"""`jax_privacy.clipping`."""

from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
from jax_privacy import clipping as peer

from gradclip.integrations import jax_privacy as ours
from side_by_side.cases import FEW, SUMS
from side_by_side.exact import Rule, Summed, together
from side_by_side.functions import Call, Library, function
from side_by_side.libraries.jax_arrays import on_arrays


def clip_pytree(**options: Any) -> Any:
    def of(module: Any) -> Call:
        def clip(leaves: list[jax.Array], threshold: float) -> tuple[Any, list[Any]]:
            clipped, norm = module.clip_pytree(leaves, threshold, **options)
            return clipped, [norm]

        return on_arrays(clip)

    return of


def clipped_fun(module: Any) -> Call:
    """Clip a function that returns the example itself."""

    def clip(leaves: list[jax.Array], threshold: float) -> tuple[Any, list[Any]]:
        made = module.clipped_fun(lambda x: x, keep_batch_dim=False, l2_clip_norm=threshold)
        return made(leaves), []

    return on_arrays(clip)


def clipped_grad(module: Any) -> Call:
    """Clip the gradients of a loss that is the product with the example, so its gradient is the example."""

    def clip(leaves: list[jax.Array], threshold: float) -> tuple[Any, list[Any]]:
        made = module.clipped_grad(_product, keep_batch_dim=False, l2_clip_norm=threshold)
        return made([jnp.ones(x.shape[1:], x.dtype) for x in leaves], leaves), []

    return on_arrays(clip)


def _product(parameters: list[jax.Array], example: list[jax.Array]) -> jax.Array:
    return sum((jnp.sum(p * x) for p, x in zip(parameters, example, strict=True)), jnp.zeros(()))


EXAMPLES = Summed(Rule(together, blanks=True))
LIBRARY = Library(
    "jax-privacy",
    version("jax-privacy"),
    [
        function("clip_pytree", clip_pytree(), peer, ours, Rule(together, blanks=True)),
        function(
            "clip_pytree (rescale_to_unit_norm)",
            clip_pytree(rescale_to_unit_norm=True),
            peer,
            ours,
            Rule(together, to_unit=True, blanks=True),
        ),
        function(
            "clip_pytree (nan_safe=False)",
            clip_pytree(nan_safe=False),
            peer,
            ours,
            Rule(together),
            cases=FEW,
            formats=(),
        ),
        function("clipped_fun", clipped_fun, peer, ours, EXAMPLES, cases=SUMS),
        function("clipped_grad", clipped_grad, peer, ours, EXAMPLES, cases=SUMS),
    ],
    compiles=True,
)
