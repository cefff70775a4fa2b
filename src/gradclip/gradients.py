"""The gradients that an in-place call is about: those of parameters, or a tree of arrays itself."""

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optree

from gradclip.backends import Backend, find, framework_of
from gradclip.backends.arrays import Arrays
from gradclip.tree import flatten


@dataclass(frozen=True)
class Gradients:
    """Gradients, each once, and what holds them: parameters with a `.grad`, or nothing."""

    grads: Sequence[Any]
    parameters: Sequence[Any]
    paths: Sequence[str] = ()

    @classmethod
    def of(cls, parameters: Any) -> "Gradients":
        """Collect the gradients. Raises where there can be none, so that a mistake is not silent."""
        if _is_array_tree(parameters):
            return cls._of_tree(parameters)
        listed = as_list(parameters)
        grads = _once([grad for grad in _grads_of(listed) if grad is not None])
        if not grads:
            _refuse_bare_gradients(listed)
        return cls(grads, listed)

    @classmethod
    def _of_tree(cls, tree: Any) -> "Gradients":
        flat = flatten(tree)
        paths = [path or "the gradient" for path in flat.paths()]
        for leaf, path in zip(flat.leaves, paths, strict=True):
            if not isinstance(leaf, np.ndarray):
                raise TypeError(
                    f"a tree to be clipped in place must hold NumPy arrays only, got {type(leaf).__name__} at {path}. "
                    "Pass such a tree, or parameters that have a .grad; for new arrays use "
                    "gradclip.clip_by_global_norm."
                )
        named = {id(leaf): path for leaf, path in zip(reversed(flat.leaves), reversed(paths), strict=True)}
        grads = _once(flat.leaves)
        return cls(grads, (), [named[id(grad)] for grad in grads])

    def names(self) -> list[str]:
        """Return what each gradient is called in an error."""
        if self.paths:
            return list(self.paths)
        places = {id(p.grad): index for index, p in reversed(list(enumerate(self.parameters)))}
        return [f"parameters[{places[id(grad)]}].grad" for grad in self.grads]

    def backend(self, *scalars: Any) -> Backend:
        """Return the backend of the gradients, or of the parameters where none has a gradient."""
        leaves = self.grads or [p for p in self.parameters[:1] if framework_of(p)]
        return find(leaves, self.names, *scalars)

    def check_writable(self) -> None:
        """Raise a ValueError that names an array which has no holder and cannot be written."""
        for grad, path in zip(self.grads, self.paths, strict=bool(self.paths)):
            if not grad.flags.writeable:
                raise ValueError(
                    f"{path} is read-only, so it cannot be clipped in place. Pass a copy, or use "
                    "gradclip.clip_by_global_norm, which returns new arrays."
                )

    def enter(self, backend: Backend) -> Arrays:
        """Return the arrays of the gradients, which share their memory. Raises TypeError for integers."""
        return backend.enter_in_place(self.grads, self.names)

    def replace(self, updated: Sequence[Any]) -> None:
        """Put each updated gradient in the `.grad` of its holders where it is another object."""
        if updated is self.grads:
            return
        changed = {id(old): new for old, new in zip(self.grads, updated, strict=True) if old is not new}
        if changed:
            for parameter in self.parameters:
                old = parameter.grad
                if id(old) in changed:
                    parameter.grad = changed[id(old)]


def as_list(parameters: Any) -> Sequence[Any]:
    """Return the parameters as a list. Raises where they are none, or an exhausted generator."""
    if isinstance(parameters, list | tuple):
        return parameters
    if hasattr(parameters, "grad"):
        return [parameters]
    if not isinstance(parameters, Iterable):
        raise TypeError(
            "parameters must be an iterable of objects with a .grad, or one such object, got "
            f"{type(parameters).__name__}. Pass model.parameters(), or a list of parameters."
        )
    listed = list(parameters)
    if not listed and inspect.isgenerator(parameters):
        raise ValueError(
            "parameters is a generator that yields nothing: it was used up by an earlier loop, or the model has no "
            "parameters. Call model.parameters() again, or keep list(model.parameters())."
        )
    return listed


def checked_list(parameters: Any) -> Sequence[Any]:
    """Return the parameters as a list. Raises where one has no `.grad`, or there are none."""
    listed = as_list(parameters)
    _grads_of(listed)
    return listed


def _grads_of(parameters: Sequence[Any]) -> list[Any]:
    try:
        return [parameter.grad for parameter in parameters]
    except AttributeError:
        index = [hasattr(parameter, "grad") for parameter in parameters].index(False)
        raise TypeError(
            f"parameters[{index}] is a {type(parameters[index]).__name__}, which has no .grad. Pass the parameters, "
            "such as model.parameters() (not named_parameters()); for a tree of gradients use "
            "gradclip.clip_by_global_norm."
        ) from None


def _once(grads: list[Any]) -> list[Any]:
    """Return the gradients without those that are another's object."""
    if len(set(map(id, grads))) == len(grads):
        return grads
    return list({id(grad): grad for grad in grads}.values())


def _is_array_tree(parameters: Any) -> bool:
    """Say whether NumPy arrays themselves were passed, rather than what has a gradient."""
    if isinstance(parameters, np.ndarray):
        return True
    first = parameters[0] if isinstance(parameters, list | tuple) and parameters else parameters
    if hasattr(first, "grad"):
        return False
    return any(isinstance(leaf, np.ndarray) for leaf in optree.tree_leaves(parameters))


def _refuse_bare_gradients(parameters: Sequence[Any]) -> None:
    for index, parameter in enumerate(parameters):
        if framework_of(parameter) == "torch" and _is_bare_tensor(parameter):
            raise ValueError(
                f"parameters[{index}] is a tensor that has no .grad and needs none: gradients were passed where the "
                "parameters belong. Pass the parameters; to clip gradients themselves use "
                "gradclip.clip_by_global_norm."
            )


def _is_bare_tensor(tensor: Any) -> bool:
    return not tensor.requires_grad and type(tensor).__name__ != "Parameter"
