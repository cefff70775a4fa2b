"""The gradients of an in-place call: those of parameters, or a tree of arrays."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gradclip.backends import Backend, Shards, any_distributed, shards_of
from gradclip.backends.arrays import Arrays
from gradclip.backends.memory import shared
from gradclip.backends.protocols import HostBackend
from gradclip.backends.registry import all_known, entry_of, find, known, lies_itself, load, may_be_weights
from gradclip.backends.values import Array
from gradclip.core.coefficient import Coefficient
from gradclip.core.decide import Clipping
from gradclip.core.nearest import Multiplier
from gradclip.core.nonfinite import PROPAGATE
from gradclip.core.units import Units
from gradclip.parameters import ParameterList
from gradclip.tree import flatten

if TYPE_CHECKING:
    from gradclip.distributed.processes import Processes


@dataclass(frozen=True)
class Gradients:
    """Gradients without duplicates, and the parameters that hold them in `.grad`, if any.

    `held` are the objects in `.grad`. `grads` are the same, but for distributed tensors their local shards. `again` are
    views of elements already counted in `grads`; they are listed only if such an array cannot be written and must be
    replaced.
    """

    grads: Sequence[Any]
    params: ParameterList
    held: Sequence[Any]
    paths: Sequence[str] = ()
    shards: Shards | None = None
    again: "Gradients | None" = None

    @classmethod
    def of(cls, params: ParameterList) -> "Gradients":
        """Collect the gradients. Raises if the parameters cannot have any, so that a mistake does not stay silent."""
        if params.tree is not None:
            return cls._of_tree(params.tree)
        params.check_all_hold()
        held = _once([grad for grad in params.gradients if grad is not None])
        if not held:
            _refuse_bare_gradients(params.parameters)
        if not any_distributed(held):
            return cls(held, params, held)
        parameters = params.parameters
        if len(held) < len(parameters):
            first = {id(grad): p for p, grad in reversed(list(zip(parameters, params.gradients, strict=True)))}
            parameters = [first[id(grad)] for grad in held]
        shards = shards_of(held, parameters)
        return cls(shards.locals, params, held, (), shards)

    @classmethod
    def _of_tree(cls, tree: object) -> "Gradients":
        flat = flatten(tree)
        paths = [path or "the gradient" for path in flat.paths()]
        for leaf, path in zip(flat.leaves, paths, strict=True):
            if not (isinstance(leaf, np.ndarray) or lies_itself(leaf)):
                raise TypeError(
                    f"a tree to clip in place must hold only NumPy arrays, got {type(leaf).__name__} at {path}. Pass "
                    "NumPy arrays, or parameters with a .grad. For other arrays, call gradclip.clip_by_global_norm, "
                    "which returns new ones."
                )
        if any(map(may_be_weights, flat.leaves)):
            warnings.warn(
                "these variables are trainable, so they are probably weights, and their values are clipped. To clip "
                "gradients, call gradclip.clip_by_global_norm(tape.gradient(loss, variables), max_norm), or store them "
                "in variables created with trainable=False.",
                UserWarning,
                stacklevel=5,
            )
        named = {id(leaf): path for leaf, path in zip(reversed(flat.leaves), reversed(paths), strict=True)}
        grads = _once(flat.leaves)
        return cls(grads, ParameterList(()), grads, [named[id(grad)] for grad in grads])

    def names(self) -> list[str]:
        """Return the name of each gradient, for errors."""
        if self.paths:
            return list(self.paths)
        places = {id(grad): index for index, grad in reversed(list(enumerate(self.params.gradients)))}
        return [f"{self.params.name(places[id(grad)])}.grad" for grad in self.held]

    def backend(self, *scalars: object, otherwise: Callable[[], Sequence[Any]]) -> Backend:
        """Return the backend of the gradients. Without any, use the arrays `otherwise`, or the parameters."""
        leaves = self.grads or otherwise() or [p for p in self.params.parameters[:1] if known(p)]
        return find(leaves, self.names, *scalars)

    def check_writable(self) -> None:
        """Raise a ValueError that names a read-only array which no parameter holds."""
        for grad, path in zip(self.grads, self.paths, strict=True):
            if isinstance(grad, np.ndarray) and not grad.flags.writeable:
                raise ValueError(
                    f"{path} is read-only, so it cannot be clipped in place. Pass a copy, or call "
                    "gradclip.clip_by_global_norm, which returns new arrays."
                )

    def check_replaceable(self, backend: Backend, arrays: Arrays) -> None:
        """Raise a TypeError that names a parameter whose gradient can be neither written nor replaced.

        Parameters of a framework accept any gradient.
        """
        parameters = self.params.parameters
        if backend.can_write(self.grads, arrays) or all_known(parameters):
            return
        for index, (parameter, grad) in enumerate(zip(parameters, self.params.gradients, strict=True)):
            if grad is None or known(parameter) or backend.writable(grad):
                continue
            try:
                parameter.grad = grad
            except (AttributeError, TypeError) as error:
                raise TypeError(
                    f"{self.params.name(index)}.grad cannot be written in place, and its holder, a "
                    f"{type(parameter).__name__}, does not accept a new one. Pass objects with a settable .grad, or "
                    "call gradclip.clip_by_global_norm, which returns new arrays."
                ) from error
            except Exception:  # it has a setter, which may reject views; the replacement is not a view
                pass

    def enter(self, backend: Backend) -> Arrays:
        """Return the gradients as backend arrays that share their memory. Raises TypeError for integers."""
        with backend.precision():
            return backend.enter_in_place(self.grads, self.names)

    def each_memory_once(self, backend: Backend) -> "tuple[Gradients, list[int]]":
        """Return the gradients without views of the same elements, and the indices of those kept.

        Raises ValueError if two share only some of their elements.
        """
        groups, meeting = shared(list(map(backend.region, self.grads)))
        if meeting is not None:
            first, second = (self.names()[index] for index in meeting)
            raise ValueError(
                f"{first} and {second} share some of their memory but are not views of the same elements, so they "
                "cannot be clipped in place together. Pass one array that holds all the elements, or copies."
            )
        kept, again = [], []
        for group in groups:
            written = [index for index in group if len(group) > 1 and backend.writable(self.grads[index])]
            kept.append((written or group)[0])
            again += [] if written else group[1:]
        kept.sort()
        return replace(self.chosen(kept), again=self.chosen(again) if again else None), kept

    def chosen(self, indices: Sequence[int]) -> "Gradients":
        """Return the gradients at `indices`."""
        grads, held, paths = ([of[i] for i in indices] if of else of for of in (self.grads, self.held, self.paths))
        return replace(self, grads=grads, held=held, paths=paths, shards=self.shards and self.shards.chosen(indices))

    def writable(self, backend: Backend) -> bool:
        """Return whether all gradients can be written in place."""
        return self.again is None and all(map(backend.writable, self.grads))

    def cleared(self, backend: Backend, arrays: Arrays, clipping: Clipping) -> Clipping:
        """Set non-finite elements of the gradients (`arrays`) to zero; return the clipping without that policy.

        Done only under the policy "zero", and only if a few operations suffice: a copy would double the memory.
        """
        at_once = backend.at_once(arrays) if clipping.nonfinite.zeroes else None
        if at_once is None or not self.writable(backend):
            return clipping
        at_once.clear(arrays)
        return replace(clipping, nonfinite=PROPAGATE)

    def scale(
        self, backend: Backend, arrays: Arrays, new: Arrays, coefficient: Coefficient | Multiplier | Units
    ) -> None:
        """Scale the gradients, which are `arrays`, starting from the values in `new`."""
        self._replace(coefficient.update(backend, self.grads, arrays, new))
        if self.again is not None:
            others = self.again.enter(backend)
            again = others if new is arrays else backend.without_nonfinite(others)
            self.again.scale(backend, others, again, coefficient)

    def put(self, backend: HostBackend, arrays: Arrays, new: Arrays, numbers: Sequence[int]) -> None:
        """Replace the gradients with these numbers by `new`; `arrays` are all gradients."""
        if new is arrays:
            backend.wrote([self.grads[number] for number in numbers])
            return
        updated = list(self.grads)
        for number in numbers:
            updated[number] = backend.put(self.grads[number], arrays[number], new[number])
        self._replace(updated)

    def clamp(self, backend: Backend, arrays: Arrays, bound: float | Array) -> None:
        """Clamp each element of the gradients, which are `arrays`."""
        self._replace(backend.update_clamped(self.grads, arrays, bound))
        if self.again is not None:
            self.again.clamp(backend, self.again.enter(backend), bound)

    def _replace(self, updated: Sequence[Any]) -> None:
        """Put each updated gradient that is a new object in the `.grad` of its parameters."""
        whole = self.shards.whole(updated) if self.shards else updated
        if whole is self.held:
            return
        changed = {id(old): new for old, new in zip(self.held, whole, strict=True) if old is not new}
        if changed:
            # The gradients read at the start: a property may return a new object each time.
            for parameter, old in zip(self.params.parameters, self.params.gradients, strict=True):
                if id(old) in changed:
                    parameter.grad = changed[id(old)]


def _once(grads: list[Any]) -> list[Any]:
    """Return the gradients without repeated objects."""
    if len(set(map(id, grads))) == len(grads):
        return grads
    return list({id(grad): grad for grad in grads}.values())


def _refuse_bare_gradients(parameters: Sequence[Any]) -> None:
    for index, parameter in enumerate(parameters):
        entry = entry_of(parameter)
        if entry is not None and load(entry).is_bare(parameter):
            raise ValueError(
                f"parameters[{index}] has no .grad and does not require one, so it looks like a gradient. Pass the "
                "parameters. To clip the gradients themselves, call gradclip.clip_by_global_norm."
            )


def entered(
    params: ParameterList, processes: "Processes", *scalars: object, to_write: bool = False
) -> tuple[Gradients, Backend, Arrays]:
    """Return the gradients, their backend, and the arrays that share their memory, after all checks."""
    gradients = Gradients.of(params)
    if to_write and gradients.paths:
        gradients.check_writable()
    backend = gradients.backend(*scalars, otherwise=processes.nothing)
    arrays = gradients.enter(backend)
    if to_write:
        gradients.check_replaceable(backend, arrays)
    if not backend.collide(gradients.grads, arrays):
        return gradients, backend, arrays
    gradients, kept = gradients.each_memory_once(backend)
    if len(kept) == len(arrays):
        return gradients, backend, arrays
    processes.keep(kept)
    return gradients, backend, gradients.enter(backend)
