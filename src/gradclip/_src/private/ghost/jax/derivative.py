"""The derivative of a clipped sum of factors in JAX: that of the same sum with gradients that are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from gradclip._src.private.batching.jax_programs import eager

Clip = Callable[[Sequence[Any], Any], tuple[Any, ...]]


def with_derivative(clip: Clip, made: Clip) -> Clip:
    """Return `clip`, a function of arguments and a mask, with the derivative of `made`, which returns the same.

    Factors stop derivatives at the parameters, and the kernels have none.
    """

    def call(args: Sequence[Any], mask: Any) -> tuple[Any, ...]:
        if eager():
            return clip(args, mask)
        leaves, structure = jax.tree.flatten((list(args), mask))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        arrays = [leaves[place] for place in places]
        # JAX keeps the functions, which must not keep tracers of a trace that is over.
        others = [None if isinstance(leaf, jax.Array) else leaf for leaf in leaves]

        def on_arrays(function: Clip) -> Callable[..., Any]:
            def of_arrays(*arrays: jax.Array) -> Any:
                given = list(others)
                for place, array in zip(places, arrays, strict=True):
                    given[place] = array
                return function(*jax.tree.unflatten(structure, given))

            return of_arrays

        return _derived(on_arrays(clip), on_arrays(made), arrays)

    return call


def _derived(clip: Callable[..., Any], made: Callable[..., Any], arrays: Sequence[jax.Array]) -> Any:
    """Return `clip(*arrays)` with the derivative of `made`, also by traced arrays that the functions close over."""
    clip, closed = jax.closure_convert(clip, *arrays)
    made, closed_by_made = jax.closure_convert(made, *arrays) if closed else (made, [])
    # Both close over the same function of the user.
    outer = list({id(x): x for x in (*closed, *closed_by_made)}.values())

    def given(of: Sequence[Any], outer_now: Sequence[Any]) -> list[Any]:
        now = {id(x): y for x, y in zip(outer, outer_now, strict=True)}
        return [now[id(x)] for x in of]

    @jax.custom_jvp
    def of_factors(outer_now: Sequence[Any], *arrays: jax.Array) -> Any:
        return clip(*arrays, *given(closed, outer_now))

    @of_factors.defjvp
    def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
        return jax.jvp(lambda now, *arrays: made(*arrays, *given(closed_by_made, now)), primals, tangents)

    return of_factors(outer, *arrays)
