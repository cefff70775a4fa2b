"""`JaxTaps`: gradients in factors for JAX, from the program that JAX traces of the loss of one example."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from gradclip._src.backends.jax.placement import varying_alike
from gradclip._src.private.batching.jax import READS_VALUES, JaxBatching, eager, reading_explained
from gradclip._src.private.batching.verbs import Args, Axes, Function
from gradclip._src.private.ghost.jax.products import FLOATS
from gradclip._src.private.ghost.jax.uses import Finder, Taps, applied, inner, taps_in
from gradclip._src.private.ghost.plan import Autograd
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


Kept = list[tuple[Array, ...]]
"""The inputs that each tap keeps, in the order of the program."""


@jax.custom_jvp
def _tapped(result: Array, zeros: Array) -> Array:
    """Return the result. Its derivative is that of `result + zeros`, which would cost a sum and change -0.0."""
    return result


@_tapped.defjvp
def _(given: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return given[0], tangents[0] + tangents[1]


def computed(program: ClosedJaxpr, inputs: Sequence[Any], taps: Taps, zeros: Iterator[Array]) -> tuple[list[Any], Kept]:
    """Return the results of a program and what its taps keep. `zeros` has an array for each tap, like its result."""
    known: dict[Var, Any] = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    known.update(zip(program.jaxpr.invars, inputs, strict=True))
    last = _last_uses(program)
    kept: Kept = []

    def value_of(value: Any) -> Any:
        return known[value] if isinstance(value, Var) else value.val

    for i, equation in enumerate(program.jaxpr.eqns):
        given, tap = [value_of(value) for value in equation.invars], taps.get(i)
        if isinstance(tap, dict):
            name = equation.primitive.name
            found, more = _NESTED.get(name, _called)(equation, given, tap, zeros)
            kept += more
        else:
            found = applied(program.jaxpr, equation, given)
            if tap is not None:
                found = [_tapped(found[0], next(zeros))]
                kept.append(tuple(given[product.kept] for product in tap.products))
        known.update(zip(equation.outvars, found, strict=True))
        for value in last.get(i, ()):
            known.pop(value, None)
    return [value_of(value) for value in program.jaxpr.outvars], kept


def _last_uses(program: ClosedJaxpr) -> dict[int, list[Var]]:
    """Return the variables that are not used after each equation, so that their memory can be used again."""
    after = {value: -1 for value in program.jaxpr.outvars if isinstance(value, Var)}
    last: dict[int, list[Var]] = {}
    for i, equation in reversed(list(enumerate(program.jaxpr.eqns))):
        for value in (*equation.invars, *equation.outvars):
            if isinstance(value, Var) and value not in after:
                after[value] = i
                last.setdefault(i, []).append(value)
    return last


Nested = Callable[[JaxprEqn, Sequence[Any], Taps, Iterator[Array]], tuple[list[Any], Kept]]


def _called(equation: JaxprEqn, given: Sequence[Any], taps: Taps, zeros: Iterator[Array]) -> tuple[list[Any], Kept]:
    program = inner(equation)
    assert program is not None
    return computed(program, given, taps, zeros)


def _in_scan(equation: JaxprEqn, given: Sequence[Any], taps: Taps, zeros: Iterator[Array]) -> tuple[list[Any], Kept]:
    settings = equation.params
    first, count = settings["num_consts"], settings["num_carry"]
    begin, rows = list(given[first : first + count]), list(given[first + count :])

    places: list[list[int]] = []

    def body(carry: list[Any], here: tuple[list[Any], list[Array]]) -> Any:
        found, kept = computed(settings["jaxpr"], [*given[:first], *carry, *here[0]], taps, iter(here[1]))
        once = {id(x): x for x in chain(*kept)}  # several taps may keep one array
        places[:] = [[list(once).index(id(x)) for x in one] for one in kept]
        return found[:count], (found[count:], list(once.values()))

    how = {name: settings[name] for name in ("length", "reverse", "unroll", "_split_transpose") if name in settings}
    own = [next(zeros) for _ in taps_in(taps)]
    end, (stacked, once) = lax.scan(body, begin, (rows, own), **how)
    return [*end, *stacked], [tuple(once[i] for i in one) for one in places]


def _in_remat(equation: JaxprEqn, given: Sequence[Any], taps: Taps, zeros: Iterator[Array]) -> tuple[list[Any], Kept]:
    def again(given: Sequence[Any], own: Sequence[Array]) -> tuple[list[Any], Kept]:
        return _called(equation, given, taps, iter(own))

    how = {name: equation.params[name] for name in ("prevent_cse", "policy")}
    found: tuple[list[Any], Kept] = jax.checkpoint(again, **how)(list(given), [next(zeros) for _ in taps_in(taps)])
    return found


_NESTED: dict[str, Nested] = {"scan": _in_scan, **dict.fromkeys(("remat2", "checkpoint", "remat"), _in_remat)}


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
