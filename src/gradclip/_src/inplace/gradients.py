"""The gradients of an in-place call: those of the parameters that count, or a tree of arrays."""

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, NamedTuple

import numpy as np

from gradclip._src.backends import USUAL, Shards, any_distributed
from gradclip._src.backends.registry import (
    all_known,
    entry_of,
    find,
    framework_of,
    known,
    lies_itself,
    load,
    may_be_weights,
)
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.decision import Clipping, Decision
from gradclip._src.core.formats import format_of
from gradclip._src.core.nonfinite import PROPAGATE
from gradclip._src.core.protocols import Backend
from gradclip._src.core.rules import Into
from gradclip._src.core.values import Array
from gradclip._src.distributed.processes import ONE_PROCESS, Processes
from gradclip._src.passed.leaves import EVERY, Choice, counted, left_in, names_in
from gradclip._src.passed.parameters import UNNAMED, ParameterList
from gradclip._src.tree import FlatTree, flatten
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


def refuse_leaf(flat: FlatTree) -> None:
    """Raise a TypeError that names the first leaf of a tree that cannot be written in place."""
    for leaf, path in zip(flat.leaves, flat.paths(), strict=True):
        if not (isinstance(leaf, np.ndarray) or lies_itself(leaf)):
            raise TypeError(
                f"a tree to clip in place must hold only NumPy arrays, got {type(leaf).__name__} at "
                f"{path or 'the gradient'}. Pass NumPy arrays, or parameters with a .grad. For other arrays, call "
                "gradclip.clip_by_global_norm, which returns new ones."
            )


_LIKE_A_GRADIENT = (
    "a gradient. Pass the parameters. To clip the gradients themselves, call gradclip.clip_by_global_norm."
)
_LIKE_A_COPY = (
    "a copy of a weight that an engine's optimizer keeps. Pass the parameters of the model. With Megatron-Core, call "
    "gradclip.clip_at_step(optimizer, max_norm)."
)


def refuse_bare_gradients(params: ParameterList) -> None:
    """Raise a ValueError that names the first parameter that looks like a gradient."""
    for index, parameter in enumerate(params.parameters):
        entry = entry_of(parameter)
        if entry is not None and load(entry).is_bare(parameter):
            like = _LIKE_A_COPY if params.sizes else _LIKE_A_GRADIENT
            raise ValueError(f"{params.name(index)} has no .grad and does not require one, so it looks like {like}")


@dataclass(frozen=True)
class Gradients:
    """The gradient of each parameter, and the `owners` that hold them in `.grad`; or those of a tree, their own owners.

    `held` are the objects in `.grad`, and `lying` the same, but for distributed tensors their local shards, and for
    subclasses that only wrap a tensor that tensor. `grads` are what is measured and scaled: of the gradients in each
    set of `meeting`, lists of indices, which share memory, all but the first are copies. With `apart`, the copies then
    replace the originals. Otherwise they are written back.
    """

    grads: Sequence[Any]
    params: ParameterList
    held: Sequence[Any]
    owners: Sequence[Any]
    lying: Sequence[Any]
    tree: FlatTree | None = None
    shards: Shards | None = None
    meeting: Sequence[Sequence[int]] = ()
    apart: bool = False

    @classmethod
    def of(cls, params: ParameterList) -> "Gradients":
        """Collect the gradients. Raises if the parameters cannot have any, so that a mistake does not stay silent."""
        if params.tree is not None:
            return cls._of_tree(counted(params.tree, params.choice))
        params.check_all_hold()
        owners, held = _once(params.parameters, params.gradients)
        params.check_no_engine_holds(some_lack=len(held) < len(params.parameters))
        if not held:
            refuse_bare_gradients(params)
        shards: Shards | None
        if any_distributed(held):
            shards = params.shards(held, owners)
        else:
            usual = set(map(type, held)) <= USUAL
            around = None if usual else framework_of(held[0])
            shards = None if around is None else around.unwrapped(held)
            if shards is None:
                return cls(held, params, held, owners, held)
        return cls(shards.locals, params, held, owners, shards.locals, None, shards)

    @classmethod
    def _of_tree(cls, flat: FlatTree) -> "Gradients":
        kinds = {type(leaf): leaf for leaf in flat.leaves}
        if not all(isinstance(leaf, np.ndarray) or lies_itself(leaf) for leaf in kinds.values()):
            refuse_leaf(flat)
        if any(map(may_be_weights, flat.leaves if kinds.keys() - {np.ndarray} else ())):
            warnings.warn(
                "these variables are trainable, so they are probably weights, and their values are clipped. To clip "
                "gradients, call gradclip.clip_by_global_norm(tape.gradient(loss, variables), max_norm), or store them "
                "in variables created with trainable=False.",
                UserWarning,
                stacklevel=5,
            )
        grads, _ = _once(flat.leaves, flat.leaves)
        return cls(grads, ParameterList(()), grads, grads, grads, flat)

    def names(self) -> list[str]:
        """Return the name of each gradient, for errors."""
        if self.tree is not None:
            paths = reversed(self.tree.paths())
            named = {id(leaf): path for leaf, path in zip(reversed(self.tree.leaves), paths, strict=True)}
            return [named[id(owner)] or "the gradient" for owner in self.owners]
        places = {id(owner): index for index, owner in reversed(list(enumerate(self.params.parameters)))}
        return [f"{self.params.name(places[id(owner)])}.grad" for owner in self.owners]

    def names_of_layers(self) -> list[str]:
        """Return the name of each gradient, as a monitor shows it."""
        return [name.removesuffix(".grad") for name in self.names()]

    def backend(self, *scalars: object, otherwise: Callable[[], Sequence[Any]]) -> Backend:
        """Return the backend of the gradients. Without any, use the arrays `otherwise`, or the parameters."""
        leaves = self.grads or otherwise() or [p for p in self.params.parameters[:1] if known(p)]
        return find(leaves, self.names, *scalars)

    def check_writable(self) -> None:
        """Raise a ValueError that names a read-only array which no parameter holds."""
        for index, grad in enumerate(self.grads):
            if isinstance(grad, np.ndarray) and not grad.flags.writeable:
                raise ValueError(
                    f"{self.names()[index]} is read-only, so it cannot be clipped in place. Pass a copy, or call "
                    "gradclip.clip_by_global_norm, which returns new arrays."
                )

    def check_replaceable(self, backend: Backend, copied: Sequence[int] = ()) -> None:
        """Raise a TypeError that names a parameter whose gradient can be neither written nor replaced.

        Those at the indices `copied` are replaced in any case. Parameters of a framework accept any gradient.
        """
        parameters = self.params.parameters
        if all_known(parameters) or (not copied and backend.writable(self.grads)):
            return
        replaced = {id(self.owners[index]) for index in copied}
        for index, (parameter, grad) in enumerate(zip(parameters, self.params.gradients, strict=True)):
            kept = id(parameter) not in replaced and (grad is None or backend.writable([grad]))
            if kept or known(parameter):
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

    def settled(self, backend: Backend, arrays: Arrays, *, apart: bool) -> "Gradients":
        """Return the gradients with copies of those that share memory; with `apart`, copies that replace them.

        Copies also replace those that share memory with a gradient that does not count. Raises ValueError if arrays of
        a tree, which cannot be replaced, do so, or share memory as numbers of different formats.
        """
        owners, left = self.left
        found = backend.meeting([*self.grads, *left], [*self.owners, *owners])
        meeting = [[index for index in one if index < len(self.grads)] for one in found]
        touched = [mine for mine, one in zip(meeting, found, strict=True) if 0 < len(mine) < len(one)]
        meeting = [one for one in meeting if one in touched or len(one) > 1]
        mixed = [one for one in meeting if len({format_of(arrays[index]) for index in one}) > 1]
        if (mixed or touched) and self.tree is not None:
            what = "memory as numbers of different formats" if mixed else "memory with arrays that do not count"
            raise ValueError(f"{self.named((mixed or touched)[0])} share {what}. Pass copies.")
        copied = {index for one in meeting for index in one[one not in touched :]}
        apart = bool(self.tree is None and (apart or mixed or touched))
        self.check_replaceable(backend, sorted(copied) if apart else ())
        grads = [_copy(grad) if index in copied else grad for index, grad in enumerate(self.grads)]
        return replace(self, grads=grads, meeting=meeting, apart=apart)

    @property
    def left(self) -> tuple[list[Any], list[Any]]:
        """The owners of gradients that do not count, and these gradients: those of the same framework."""
        if self.tree is not None:
            others = [x for x in self.tree.others.values() if isinstance(x, np.ndarray) or lies_itself(x)]
            return others, others
        if not self.params.left:
            return [], []
        both = [(owner, owner.grad) for owner in self.params.left.values() if self._beside(owner.grad)]
        return [owner for owner, _ in both], [grad for _, grad in both]

    def _beside(self, grad: object) -> bool:
        own = entry_of(self.grads[0]) if self.grads else None
        return own is not None and entry_of(grad) is own and not any_distributed([grad])

    def named(self, indices: Sequence[int]) -> str:
        """Return the names of the gradients at `indices`, for errors."""
        names = self.names()
        return listed([names[index] for index in sorted(indices)])

    def chosen(self, indices: Sequence[int]) -> "Gradients":
        """Return the gradients at `indices`."""
        each = (self.grads, self.held, self.owners, self.lying)
        grads, held, owners, lying = ([of[i] for i in indices] for of in each)
        shards = self.shards and self.shards.chosen(indices)
        return replace(self, grads=grads, held=held, owners=owners, lying=lying, shards=shards)

    def separate(self, backend: Backend) -> None:
        """Put the copies of gradients that share memory in the `.grad` of their parameters."""
        if self.meeting:
            self.put(backend, self.grads)

    def put(self, backend: Backend, updated: Sequence[Any]) -> None:
        """Write copies back to where they come from, and put each new object in the `.grad` of its parameter."""
        if self.meeting and not self.apart:
            every = zip(updated, self.grads, self.lying, strict=True)
            updated = [new if grad is old else self._written(backend, old, new) for new, grad, old in every]
        whole = self.shards.whole(updated) if self.shards else updated
        # PyTorch 2.11 cannot compile a comparison of two lists by identity.
        if backend.visible and whole is self.held:
            return
        for owner, old, new in zip(self.owners, self.held, whole, strict=True):
            if old is not new:
                owner.grad = new

    def _written(self, backend: Backend, old: Any, new: Any) -> Any:
        if not backend.writable([old]):
            return new
        backend.write_back(old, new)
        return old


def _copy(grad: Any) -> Any:
    framework = framework_of(grad)
    assert framework is not None
    return framework.kept(grad)


class Taken(NamedTuple):
    """The gradients of a call, their backend, and the arrays to measure. The arrays are the gradients."""

    gradients: Gradients
    backend: Backend
    arrays: Arrays

    def chosen(self, indices: Sequence[int]) -> "Taken":
        """Return the gradients at `indices`."""
        if list(indices) == list(range(len(self.arrays))):
            return self
        return Taken(self.gradients.chosen(indices), self.backend, self.backend.chosen(self.arrays, indices))

    def cleared(self, clipping: Clipping) -> Clipping:
        """Set non-finite elements to zero; return the clipping without that policy.

        Done only under the policy "zero", and only if a few operations suffice: a copy would double the memory.
        """
        few = clipping.nonfinite.zeroes and self.backend.multi_tensor(self.arrays) is not None
        if not (few and self.backend.writable(self.gradients.grads)):
            return clipping
        self.backend.clear(self.arrays)
        return replace(clipping, nonfinite=PROPAGATE)

    def scale(self, made: Decision) -> None:
        """Scale the gradients as decided."""
        gradients = self.gradients
        if gradients.meeting and not gradients.apart and made.changes_nothing(self.backend, self.arrays):
            return
        gradients.put(self.backend, made.scaled(self.backend, Into(self.arrays, gradients.grads)))

    def clamp(self, bound: float | Array) -> None:
        """Clamp each element of the gradients."""
        updated = self.backend.clamp(self.arrays, bound, Into(self.arrays, self.gradients.grads))
        self.gradients.put(self.backend, updated)


def _once(owners: Sequence[Any], gradients: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return each different owner that has a gradient, and its gradient."""
    if len(set(map(id, owners))) == len(owners) and type(None) not in set(map(type, gradients)):
        return list(owners), list(gradients)
    both = {id(owner): (owner, grad) for owner, grad in zip(owners, gradients, strict=True) if grad is not None}
    return [owner for owner, _ in both.values()], [grad for _, grad in both.values()]


def entered(
    params: ParameterList,
    processes: Processes,
    *scalars: object,
    to_write: bool = False,
    apart: bool = False,
    may_lack: bool = False,
) -> Taken:
    """Return the gradients, after all checks.

    The arrays share the gradients' memory, except that with `to_write`, no two of them share any. With `apart`, each
    parameter's gradient then gets memory of its own. Warns if no parameter has a gradient, on any process, unless all
    `may_lack` one.
    """
    gradients = Gradients.of(params)
    if not (may_lack or gradients.held):
        processes.lack_gradients(params)
    if to_write and gradients.tree is not None:
        gradients.check_writable()
    try:
        backend = gradients.backend(*scalars, otherwise=processes.nothing)
        arrays = gradients.enter(backend)
    except TypeError:
        floats = without_integers(params) if processes is ONE_PROCESS else None
        if floats is None:
            raise
        return entered(floats, processes, *scalars, to_write=to_write, apart=apart, may_lack=may_lack)
    if not to_write:
        return Taken(gradients, backend, arrays)
    gradients.check_replaceable(backend)
    if gradients.grads and (gradients.left[0] or backend.collide(gradients.grads, arrays)):
        gradients = gradients.settled(backend, arrays, apart=apart)
    return Taken(gradients, backend, gradients.enter(backend) if gradients.meeting else arrays)
