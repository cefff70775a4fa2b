"""Gradients that this process lacks although other processes may have them."""

from collections.abc import Callable, Sequence
from typing import Any

from gradclip.backends.torch.distributed import nothing_like
from gradclip.parameters import ParameterList


def filled(params: ParameterList, shape: Callable[[Any], Sequence[int]], device: object) -> ParameterList:
    """Return the parameters with a tensor without elements in the place of each gradient that is missing here.

    `shape` returns the shape of that tensor from this process's part of the parameter.
    """
    lacking = [index for index, grad in enumerate(params.gradients) if grad is None]
    if not lacking or params.tree is not None:
        return params
    params.check_all_hold()
    params.check_no_engine_holds(some_lack=True)
    parameters = {id(params.parameters[index]): params.parameters[index] for index in lacking}
    made = {key: nothing_like(parameter, shape, device) for key, parameter in parameters.items()}
    every = zip(params.parameters, params.gradients, strict=True)
    return params.with_gradients([made.get(id(p)) if grad is None else grad for p, grad in every])
