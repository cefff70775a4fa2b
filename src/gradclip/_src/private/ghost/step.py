"""A batch whose gradients come in factors: which do, and the step that clips and adds them up."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from gradclip._src.backends.entries import Entry
from gradclip._src.backends.registry import find
from gradclip._src.core.formats import FLOAT64, bare_name, dtype_name
from gradclip._src.core.values import Array
from gradclip._src.private.batching.calls import Clipped, Outline, PreparedCall
from gradclip._src.private.batching.verbs import Args, Function, Programs, named
from gradclip._src.private.ghost.clip import clip_factors, multiplied, terms_of
from gradclip._src.private.ghost.plan import SMALLEST, Plan, elements_of, planned
from gradclip._src.private.ghost.taps import Argnums, NotInFactorsError, Products, Taps
from gradclip._src.private.sums.settings import PerExampleSettings
from gradclip._src.tree import FlatTree, flatten


class Tools(NamedTuple):
    """The taps of a framework, its products, and what gives a clipped sum a derivative, if sums have one."""

    taps: Taps
    products: type[Products]
    with_derivative: Callable[[Any, Any], Any] | None = None


def has_tools(framework: Entry) -> bool:
    """Say whether a framework offers any."""
    return framework.module in _OF


def tools_of(framework: Entry) -> Tools:
    """Return what a framework offers."""
    return _OF[framework.module]()


# Each function uses an import statement: `torch.compile` cannot trace any other kind of import.
def _jax() -> Tools:
    from gradclip._src.private.ghost.jax.matrices import JaxProducts
    from gradclip._src.private.ghost.jax.taps import JaxTaps, with_derivative

    return Tools(JaxTaps(), JaxProducts, with_derivative)


def _torch() -> Tools:
    from gradclip._src.private.ghost.torch.matrices import TorchProducts
    from gradclip._src.private.ghost.torch.taps import TorchTaps

    return Tools(TorchTaps(), TorchProducts)


_OF = {"jax": _jax, "torch": _torch}


Clip = Callable[[Sequence[Any], Array | None], Clipped]

_UNKNOWN = object()  # no key of a program may hold it
_REAL = ("float16", "bfloat16", "float32", "float64")


def planned_for(
    call: PreparedCall,
    fun: Function,
    argnums: Argnums,
    examples: int,
    method: str,
    plans: Programs,
    *,
    traced_once: bool,
) -> Plan:
    """Return the plan of a call for so many examples at a time: without leaves if all gradients are made.

    `plans` keeps it for calls of the same shapes, in which the function computes the same, or is `traced_once`.

    Raises ValueError for method="ghost" if a large parameter cannot be measured from factors.
    """
    if not call.examples:
        call = call._replace(args=call.verbs.padded(call.args, call.axes, None, 0, 1)[0])
    if method == "auto" and not _may_help(call, parameters_of(call.args, argnums).leaves):
        return Plan((), examples)
    why = why_none(call, argnums)
    if why and method == "ghost":
        raise ValueError(f"method='ghost' is not possible here: {why}. Pass method='auto'.")
    if why:
        return Plan((), examples)
    taps, arguments = tools_of(call.framework).taps, (fun, argnums, call.args, call.axes)
    program = taps.program(*arguments, traced_once=traced_once)
    shapes = _key(call, examples)
    key = None if program is None or shapes is None else (program, shapes)
    if key is not None and key in plans:
        found: Plan = plans[key]
        return found
    plan = planned(taps.uses(*arguments), examples, method, taps.autograd)
    plan = replace(plan, program=_UNKNOWN if program is None else program)
    if key is not None:
        plans.keep(key, plan)
    return plan


def _may_help(call: PreparedCall, parameters: Sequence[object]) -> bool:
    """Say whether factors may save time, or run what the framework cannot run over a batch."""
    large = any(elements_of(x) >= SMALLEST for x in parameters)
    return large or (has_tools(call.framework) and tools_of(call.framework).taps.runs_more)


def parameters_of(args: Args, argnums: Argnums) -> FlatTree:
    """Return the differentiated arguments, as a tree with the structure of the gradient."""
    return flatten(tuple(args[i] for i in argnums) if isinstance(argnums, tuple) else args[argnums])


def why_none(call: PreparedCall, argnums: Argnums) -> str:
    """Return why no gradient can come in factors; an empty string if some may."""
    parameters = parameters_of(call.args, argnums)
    if not has_tools(call.framework):
        return f"{call.framework.name} has no taps for products"
    if prevented := tools_of(call.framework).taps.prevented():
        return prevented
    other = {dtype_name(x) if hasattr(x, "dtype") else type(x).__name__ for x in parameters.leaves} - {*_REAL}
    if other or not parameters.leaves:
        return f"parameters have dtype {', '.join(sorted(other))}" if other else "there are no parameters"
    if find(parameters.leaves, parameters.paths).wide is not FLOAT64:
        return "the device has no float64, and no bound is proven for sums in float32"
    return ""


def _key(call: PreparedCall, examples: int) -> Hashable | None:
    """Return a key of everything that a plan depends on, except for what the function closes over."""
    flat = flatten(list(call.args))
    kinds = [
        (tuple(x.shape), bare_name(x.dtype)) if hasattr(x, "shape") and hasattr(x, "dtype") else named(x)
        for x in flat.leaves
    ]
    return None if None in kinds else (examples, tuple(call.axes), flat.structure, tuple(kinds))


def in_factors(
    call: PreparedCall,
    fun: Function,
    argnums: Argnums,
    plan: Plan,
    settings: PerExampleSettings,
    made: Clip,
    note: Callable[..., None],
) -> Clip:
    """Return a function that clips and adds up a batch, given its arguments and a mask.

    `made` does the same with gradients that are made. A framework may take the derivative from it. `note` is told
    whether factors may cancel: a function may use parameters in other ways than when it was planned.
    """
    tools, axes = tools_of(call.framework), call.axes

    def clip(args: Sequence[Any], mask: Array | None) -> tuple[Any, ...]:
        parameters = parameters_of(args, argnums)
        products = [leaf.how == "product" for leaf in plan.leaves]
        try:
            found = tools.taps.run(fun, argnums, args, axes, plan.tapped, products)
        except NotInFactorsError as error:  # it was planned when the function did not do that
            if plan.insists:
                raise ValueError(f"method='ghost' is not possible here: {error}. Pass method='auto'.") from None
            return derived(args, mask)
        by = tools.products(concrete=False)
        gradients = [
            multiplied(by, gradient) if product else gradient
            for gradient, product in zip(found.gradients, products, strict=True)
        ]
        note(ghost=plan.ghost, cancels=any(terms_of(gradient) > 1 for gradient in gradients))
        summed, norms = clip_factors(tools.products, parameters, gradients, settings, mask)
        return summed, norms, (found.values, found.aux)

    def derived(args: Sequence[Any], mask: Array | None) -> tuple[Any, ...]:
        summed, norms, _, outputs = made(args, mask)
        return summed, norms, outputs

    full = clip if tools.with_derivative is None else tools.with_derivative(clip, derived)

    def outlined(args: Sequence[Any], mask: Array | None) -> Clipped:
        summed, norms, outputs = full(args, mask)
        leaves = [Outline((1, *x.shape), x.dtype) for x in parameters_of(args, argnums).leaves]
        return Clipped(summed, norms, leaves, outputs)

    return outlined
