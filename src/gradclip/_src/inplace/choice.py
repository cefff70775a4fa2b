"""Which parameters of an in-place call count: those that `where` chooses, without integers in place of gradients."""

from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import compress
from typing import Any

from gradclip._src.passed.choice import EVERY, Choice
from gradclip._src.passed.groups import UNNAMED
from gradclip._src.passed.leaves import left_in, names_in
from gradclip._src.passed.parameters import ParameterList
from gradclip._src.tree import flatten
from gradclip._src.words import listed


def chosen(params: ParameterList, choice: Choice, *, alone: bool) -> ParameterList:
    """Return only the parameters that are chosen. `alone`: the call names no other processes.

    Raises ValueError if a parameter has no name, or if no parameter is chosen on any process.
    """
    return _of(params, choice, alone, _only)


def others_left(params: ParameterList, choice: Choice, *, alone: bool) -> ParameterList:
    """Return all parameters, of which those that are not chosen seem to have no gradient. Raises likewise."""
    return _of(params, choice, alone, _leaving)


_Chooser = Callable[[ParameterList, Collection[int]], ParameterList]


def _of(params: ParameterList, choice: Choice, alone: bool, choose: _Chooser) -> ParameterList:
    if choice is EVERY:
        return params
    alone = alone and all(beside is UNNAMED for beside in params.beside)
    params = replace(params, choosing=replace(choice, alone=alone))
    if choice.where is None or (alone and params.tree is not None):
        return params
    names = params.names_for("where") if params.tree is None else names_in(flatten(params.tree))
    places = params.choice.left(names)
    if len(places) == len(names):
        params = replace(params, unmatched=choice.no_match(names))
    if params.tree is not None:
        return params
    counting = {id(one) for place, one in enumerate(params.parameters) if place not in places}
    # A parameter under two names counts if one of them is chosen.
    return choose(params, {place for place in places if id(params.parameters[place]) not in counting})


def _only(params: ParameterList, places: Collection[int]) -> ParameterList:
    kept = [place not in places for place in range(len(params.parameters))]
    ends = iter(kept)
    sizes = [sum(next(ends) for _ in range(size)) for size in params.sizes]
    parameters, names = (list(compress(of, kept)) for of in (params.parameters, params.names))
    return replace(params, parameters=parameters, names=names, sizes=sizes, left=_with_gradient(params, places))


def _leaving(params: ParameterList, places: Collection[int]) -> ParameterList:
    gradients = [None if place in places else grad for place, grad in enumerate(params.gradients)]
    return replace(params, left=params.left | _with_gradient(params, places)).with_gradients(gradients)


def _with_gradient(params: ParameterList, places: Collection[int]) -> dict[int, Any]:
    having = (params.parameters[place] for place in sorted(places) if params.gradients[place] is not None)
    return {id(parameter): parameter for parameter in having}


def without_integers(params: ParameterList) -> ParameterList | None:
    """Return the parameters, of which those with integers as gradients seem to have none.

    Return None if all gradients are integers, or none is. Raises TypeError if integers are refused.
    """
    places = left_in(params.gradients)
    named = [f"{params.name(place)}.grad {what}" for place, what in places.items() if what]
    if named and params.choice.refuses:
        raise TypeError(
            f"integers='raise' refuses integers: {listed(named)}. If these are gradients, convert them to floating "
            "point, for example to float32."
        )
    some = len(places) < sum(grad is not None for grad in params.gradients)
    return _leaving(params, places) if places and some else None
