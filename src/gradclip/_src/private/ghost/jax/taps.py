"""`JaxTaps`: gradients in factors for JAX, from the program that JAX traces of the loss of one example."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from gradclip._src.backends.jax.placement import varying_alike
from gradclip._src.private.batching.jax import READS_VALUES, JaxBatching, reading_explained
from gradclip._src.private.batching.jax_programs import eager
from gradclip._src.private.batching.verbs import Args, Axes, Function
from gradclip._src.private.ghost.costs import Autograd
from gradclip._src.private.ghost.jax.interpret import computed
from gradclip._src.private.ghost.jax.products import FLOATS
from gradclip._src.private.ghost.jax.uses import Finder, Taps, taps_in
from gradclip._src.private.ghost.records import Gradient, LeafUses, Made, PlacedTerms, Tapped, Use
from gradclip._src.private.ghost.taps import Argnums
from gradclip._src.private.ghost.taps import Taps as AnyTaps
from gradclip._src.tree import flatten

Found = TypeVar("Found")

_UNTRACED = "the function reads values while it is traced"


@dataclass(frozen=True)
class JaxTaps(AnyTaps):
    """`Taps` for JAX. `spmd_axis_name` is as in `jax.vmap`."""

    autograd = Autograd(addition=8.0, convolution=1.0)  # XLA adds within its loop

    spmd_axis_name: Hashable = None

    def uses(self, fun: Function, argnums: Argnums, args: Args, axes: Axes) -> list[LeafUses]:
        return _of_shapes(lambda given: _uses_of_one(fun, argnums, given, axes), args, axes)

    def program(self, fun: Function, argnums: Argnums, args: Args, axes: Axes, *, traced_once: bool) -> str | None:
        if traced_once or not eager():
            return "" if eager() else None
        try:
            return _of_shapes(lambda given: _text_of_one(fun, argnums, given), args, axes)
        except (TypeError, IndexError):  # it reads values
            return None

    def run(
        self,
        fun: Function,
        argnums: Argnums,
        args: Args,
        axes: Axes,
        tapped: Sequence[bool],
        made_soon: Sequence[bool] = (),
    ) -> Tapped:
        chosen = [i for i, flag in enumerate(tapped) if flag]
        static: list[Any] = []

        def of_one(*args: Any) -> Any:
            value, aux, made, terms, *rest = _run_one(fun, argnums, args, chosen)
            static[:] = rest
            return value, aux, made, terms

        value, aux, made, terms = JaxBatching().over_batch(of_one, axes, self.spmd_axis_name)(*args)
        uses, untapped = static
        gradients: dict[int, Gradient] = {i: Made(rows) for i, rows in made.items()}
        for i in [i for i in chosen if i not in untapped]:
            places = {where: None for leaf, where in uses if leaf == i}
            of = {where: [one for use, one in zip(uses, terms, strict=True) if use == (i, where)] for where in places}
            gradients[i] = [PlacedTerms(where, found) for where, found in of.items()]
        return Tapped([gradients[i] for i in range(len(tapped))], value, aux, untapped)


def _of_shapes(look: Callable[[list[Any]], Found], args: Args, axes: Axes) -> Found:
    """Return what a function finds in the arguments of one example. Nothing is computed."""
    found: list[Found] = []

    def of_one(*rows: Any) -> tuple[()]:
        rest = iter(rows)
        found.append(look([arg if axis is None else next(rest) for arg, axis in zip(args, axes, strict=True)]))
        return ()

    jax.eval_shape(jax.vmap(of_one), *[arg for arg, axis in zip(args, axes, strict=True) if axis is not None])
    return found[-1]


def _text_of_one(fun: Function, argnums: Argnums, args: Args) -> str | None:
    """Return the program of the value and gradient of one example; None if its text leaves something out."""
    leaves, structure = jax.tree.flatten(list(args))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]

    def of_arrays(*arrays: Any) -> Any:
        given = dict(enumerate(leaves)) | dict(zip(places, arrays, strict=True))
        return jax.value_and_grad(fun, argnums, has_aux=True)(*jax.tree.unflatten(structure, given.values()))

    # The text of a gradient also has the rules of functions with derivatives of their own.
    program = jax.make_jaxpr(of_arrays)(*[leaves[i] for i in places])
    text = str(program)
    # A text names neither the values that the function closes over nor Python functions, whose addresses it hides.
    return None if program.consts or "0x" in text else text


def _differentiated(args: Args, argnums: Argnums) -> Any:
    return args[argnums] if isinstance(argnums, int) else tuple(args[i] for i in argnums)


@dataclass(frozen=True)
class _Traced:
    """The program of one example, of the leaves of the differentiated arguments, and the structure of its results."""

    program: ClosedJaxpr
    structure: Any

    @classmethod
    def of(cls, fun: Function, argnums: Argnums, args: Args) -> _Traced | None:
        """Trace a function. Return None if it reads values, or if its value is not a scalar, which is an error."""
        _, structure = jax.tree.flatten(_differentiated(args, argnums))

        def of_leaves(*leaves: Any) -> Any:
            given, new = list(args), jax.tree.unflatten(structure, leaves)
            for i, one in [(argnums, new)] if isinstance(argnums, int) else zip(argnums, new, strict=True):
                given[i] = one
            return fun(*given)

        leaves = jax.tree.leaves(_differentiated(args, argnums))
        try:
            program, results = jax.make_jaxpr(of_leaves, return_shape=True)(*leaves)
        except READS_VALUES:
            return None
        first = jax.tree.leaves(results[0])
        return cls(program, jax.tree.structure(results)) if len(first) == 1 and first[0].shape == () else None

    def found(self, chosen: Sequence[int], of_example: Sequence[Any] = ()) -> tuple[Taps, Finder]:
        """Return the taps for some of the leaves, and why leaves cannot be tapped. `of_example`: an example's data."""
        kinds = {i: str(self.program.in_avals[i].dtype) for i in chosen}
        finder = Finder({i: f"{kind} parameter" for i, kind in kinds.items() if kind not in FLOATS})
        finder.reasons |= {i: "no elements" for i in chosen if 0 in self.program.in_avals[i].shape}
        finder.of_example = set(map(id, of_example))
        tracked = {i: i for i in chosen if i not in finder.reasons}
        return finder.of_program(self.program, tracked, 1), finder

    def tapped(self, chosen: Sequence[int]) -> tuple[Taps, dict[int, str]]:
        """Return the taps for those of the leaves that can be tapped, and the others."""
        untapped: dict[int, str] = {}
        taps, finder = self.found(chosen)
        while finder.reasons:
            untapped |= finder.reasons
            taps, finder = self.found([i for i in chosen if i not in untapped])
        return taps, untapped


def _uses_of_one(fun: Function, argnums: Argnums, args: Args, axes: Axes) -> list[LeafUses]:
    """Return the uses of each leaf in a function of one example."""
    flat = flatten(_differentiated(args, argnums))
    traced = _Traced.of(fun, argnums, args)
    uses: dict[int, list[Use]] = {i: [] for i in range(len(flat.leaves))}
    reasons, added = dict.fromkeys(uses, _UNTRACED), set[int]()
    if traced is not None:
        data = [x for arg, axis in zip(args, axes, strict=True) if axis == 0 for x in jax.tree.leaves(arg)]
        taps, finder = traced.found(list(uses), data)
        reasons, added = finder.reasons, finder.added
        for product in [product for tap in taps_in(taps) for product in tap.products]:
            uses[product.leaf].append(product.use)
    found = []
    for i, (path, leaf) in enumerate(zip(flat.paths(), flat.leaves, strict=True)):
        kind = str(jnp.result_type(leaf)) if traced is None else str(traced.program.in_avals[i].dtype)
        reason = reasons.get(i, "")
        own = () if reason else tuple(uses[i])
        found.append(LeafUses(path, tuple(jnp.shape(leaf)), kind, own, reason, added=i in added))
    return found


def _run_one(fun: Function, argnums: Argnums, args: Args, chosen: Sequence[int]) -> tuple[Any, ...]:
    """Return the value, aux, the gradients of leaves that are made, all terms, whose they are, and who is untapped."""
    traced = _Traced.of(fun, argnums, args) if chosen else None
    taps, untapped = ({}, dict.fromkeys(chosen, _UNTRACED)) if traced is None else traced.tapped(chosen)
    if traced is None or len(untapped) == len(chosen):
        with reading_explained():
            (value, aux), made = jax.value_and_grad(fun, argnums, has_aux=True)(*args)
        return value, aux, dict(enumerate(jax.tree.leaves(made))), [], [], untapped
    leaves = dict(enumerate(jax.tree.leaves(_differentiated(args, argnums))))
    rest = {i: leaf for i, leaf in leaves.items() if i not in chosen or i in untapped}
    zeros = [jnp.zeros(tap.shape, tap.dtype) for tap in taps_in(taps)]
    _, zeros = varying_alike(list(leaves.values()), zeros)

    def loss(rest: dict[int, Any], zeros: list[jax.Array]) -> Any:
        inputs = [rest.get(i, leaf) for i, leaf in leaves.items()]
        results, kept = computed(traced.program, inputs, taps, iter(zeros))
        value, aux = jax.tree.unflatten(traced.structure, results)
        return value, (aux, kept)

    (value, (aux, kept)), (made, cotangents) = jax.value_and_grad(loss, (0, 1), has_aux=True)(rest, zeros)
    terms, owners = [], []
    for tap, inputs, cotangent in zip(taps_in(taps), kept, cotangents, strict=True):
        for product, x in zip(tap.products, inputs, strict=True):
            terms.append(product.terms_of(x, cotangent))
            owners.append((product.leaf, product.use.place))
    return value, aux, made, terms, owners, untapped
