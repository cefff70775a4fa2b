"""Gradients that this process lacks although other processes may have them."""

from collections.abc import Callable
from typing import Any

from gradclip._src.passed.parameters import ParameterList


def filled(params: ParameterList, nothing: Callable[[Any], Any]) -> ParameterList:
    """Return the parameters with an array without elements in the place of each gradient that is missing here.

    `nothing` returns that array for a parameter.
    """
    lacking = [index for index, grad in enumerate(params.gradients) if grad is None]
    if not lacking or params.tree is not None:
        return params
    params.check_all_hold()
    params.check_no_engine_holds(some_lack=True)
    parameters = {id(params.parameters[index]): params.parameters[index] for index in lacking}
    made = {key: nothing(parameter) for key, parameter in parameters.items()}
    every = zip(params.parameters, params.gradients, strict=True)
    return params.with_gradients([made.get(id(p)) if grad is None else grad for p, grad in every])
