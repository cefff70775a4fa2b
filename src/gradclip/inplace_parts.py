"""Calls in place with several norms: those of layers, each a gradient or several, or of the units of each gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gradclip.arguments import check_thresholds, is_single_threshold
from gradclip.choice import choice_of
from gradclip.core.decision import Clipping
from gradclip.core.holders import Holders, Measured, Together
from gradclip.core.layouts import Groups, Several
from gradclip.core.pipeline import decide
from gradclip.core.protocols import Backend
from gradclip.core.records import OneFactor
from gradclip.core.several import Each, Following, left_norms
from gradclip.core.several import together as as_vector
from gradclip.core.together import entries_of, measured, part_of
from gradclip.distributed.processes import ONE_PROCESS, Processes, processes_of, telling
from gradclip.gradients import Gradients, Taken, entered
from gradclip.leaves import layers_of, split_by
from gradclip.parameter_choice import others_left
from gradclip.parameter_groups import as_tuple
from gradclip.parameters import ParameterList, reusable
from gradclip.tree import FlatTree
from gradclip.typing import Integers, Meshes, Parameters, ProcessGroups, Thresholds, Where
from gradclip.words import typed


class Call(NamedTuple):
    """A call with many norms: its name, its parameters, and the processes that hold their gradients."""

    name: str
    params: ParameterList
    processes: Processes

    @classmethod
    def of(
        cls,
        name: str,
        parameters: Parameters,
        process_group: ProcessGroups,
        mesh: Meshes,
        where: Where,
        integers: Integers,
    ) -> Call:
        """List the parameters. Errors also reach the other processes, if any are named."""
        if process_group is None and mesh is None:
            parameters = reusable(parameters)
        with telling(parameters, process_group, mesh, each=True):
            alone = not (as_tuple(process_group) or as_tuple(mesh))
            params = others_left(ParameterList.of(parameters), choice_of(where, integers), alone=alone)
        return cls(name, params, processes_of(params, process_group, mesh, each=True))

    @property
    def lacking(self) -> set[int]:
        """The ids of the parameters without a gradient on this process, which others may have."""
        if self.processes is ONE_PROCESS:
            return set()
        return {id(p) for p, grad in zip(self.params.parameters, self.params.gradients, strict=True) if grad is None}

    def ask(self, clipping: Clipping, /, **arguments: object) -> None:
        """Record the arguments, which must be the same on all processes. Thresholds are lists of numbers."""
        self.processes.ask(
            clipping.order,
            clipping.nonfinite,
            more=[("function", self.name), *arguments.items(), *self.params.choice.told],
        )

    def taken(self, *scalars: object, shape: Callable[[Any], Sequence[int]] = lambda _: (0,)) -> Taken:
        """Return the gradients, after all checks, with something in the place of those that only others may have.

        `shape` returns the shape of that from the part of a parameter that this process has.
        """
        params = self.processes.filled(self.params, shape)
        return entered(params, self.processes, *scalars, to_write=True, apart=True)


@dataclass(frozen=True)
class Layerwise:
    """The unique layers of a call, as the indices of their gradients, and their thresholds.

    `arranged` puts the norms of the layers into the caller's structure.
    """

    groups: Groups
    thresholds: Sequence[Any]
    arranged: Callable[[Sequence[Any]], Any]

    @classmethod
    def of(cls, params: ParameterList, max_norm: Thresholds, backend: Backend, gradients: Gradients) -> Layerwise:
        """Make each parameter, or each part of a tree, a layer.

        Raises ValueError if the thresholds do not fit, or if arrays of a tree, which cannot be replaced, share memory
        but are in different layers.
        """
        if gradients.tree is not None:
            return cls._of_tree(gradients.tree, max_norm, backend, gradients)
        grads = gradients.params.gradients
        max_norms: Sequence[object]
        if is_single_threshold(max_norm) and not getattr(max_norm, "shape", ()):
            max_norms = [max_norm] * len(grads)
        elif isinstance(max_norm, list | tuple):
            max_norms = max_norm
        else:
            raise TypeError(f"{_one_for_each(grads)}, got {typed(max_norm)}.")
        if len(max_norms) != len(grads):
            raise ValueError(f"{_one_for_each(grads)}, got a list of {len(max_norms)}.")
        thresholds = check_thresholds(max_norms, backend)
        filled = [number for number, grad in enumerate(grads) if grad is not None]
        owners = [params.parameters[number] for number in filled]

        def arranged(norms: Sequence[Any]) -> list[Any]:
            left = gradients.params.left
            zero = _zero(backend, gradients.grads) if left else None
            every = [zero if id(parameter) in left else None for parameter in params.parameters]
            for number, norm in zip(filled, norms, strict=True):
                if id(params.parameters[number]) not in left and params.gradients[number] is not None:
                    every[number] = norm
            return every

        own = [thresholds[number] for number in filled]
        return cls._once(owners, Groups.each_alone(len(filled)), own, arranged, None, gradients)

    @classmethod
    def _of_tree(cls, flat: FlatTree, max_norm: Thresholds, backend: Backend, gradients: Gradients) -> Layerwise:
        single = is_single_threshold(max_norm)
        prefix, layers = layers_of(flat) if single else split_by(flat, max_norm)
        thresholds = check_thresholds([max_norm] * layers.count if single else prefix.leaves, backend)
        zero = _zero(backend, flat.leaves)
        return cls._once(flat.leaves, layers, thresholds, prefix.arrange, zero, gradients)

    @classmethod
    def _once(
        cls,
        owners: Sequence[Any],
        layers: Groups,
        thresholds: Sequence[Any],
        rebuild: Callable[[Sequence[Any]], Any],
        of_nothing: Any,
        gradients: Gradients,
    ) -> Layerwise:
        """Return layers, given by indices of owners, without duplicates. `of_nothing` is the norm of an empty one."""
        groups: Sequence[Any] = layers.groups
        firsts: Sequence[int] = range(layers.count)
        if len(owners) > len(gradients.grads) or gradients.meeting:
            groups = _by_gradients(owners, groups, thresholds, gradients)
            known: dict[Any, int] = {}
            firsts = [known.setdefault(group, number) for number, group in enumerate(groups)]
        elif all(groups):
            return cls(layers, thresholds, rebuild)
        kept = [number for number, group in enumerate(groups) if group and firsts[number] == number]

        def arranged(norms: Sequence[Any]) -> Any:
            norm_of = dict(zip(kept, norms, strict=True))
            return rebuild([norm_of.get(number, of_nothing) for number in firsts])

        chosen = Groups([groups[number] for number in kept], alone=len(kept) == len(gradients.grads))
        return cls(chosen, [thresholds[number] for number in kept], arranged)


def _zero(backend: Backend, leaves: Sequence[Any]) -> Any:
    """Return the norm of what does not count."""
    with backend.precision():
        return backend.leave_scalar(backend.zeros((), ()), "float32", leaves)


def _by_gradients(
    owners: Sequence[Any], layers: Sequence[Sequence[int]], thresholds: Sequence[Any], gradients: Gradients
) -> list[tuple[int, ...]]:
    """Return the indices of each layer's gradients. Raises ValueError if layers share some, but not a threshold."""
    places = {id(owner): index for index, owner in enumerate(gradients.owners)}
    groups = [tuple(sorted({places[id(owners[index])] for index in layer})) for layer in layers]
    asked = dict(zip(groups, thresholds, strict=True))
    differ = any(
        asked[group] is not c and asked[group] != c for group, c in zip(groups, thresholds, strict=True) if group
    )
    layer_of = {index: group for group in asked for index in group}
    if differ or len(layer_of) < sum(map(len, asked)):
        raise ValueError(
            "a parameter or array occurs twice, in two layers or with two thresholds, so its threshold is "
            "ambiguous. Pass it once."
        )
    for meeting in () if gradients.apart else gradients.meeting:
        if len({layer_of[index] for index in meeting}) > 1:
            raise ValueError(
                f"{gradients.named(meeting)} share memory, so they cannot be scaled by different numbers in place. "
                "Pass copies, or call a function that returns new arrays, such as gradclip.clip_by_layer_norm."
            )
    return groups


def _one_for_each(grads: Sequence[Any]) -> str:
    return f"max_norm must be a number, or a list with one number for each of the {len(grads)} parameters, in order"


def clip_parts(
    taken: Taken, layout: Several, thresholds: Each | Following, clipping: Clipping, holders: Holders
) -> list[Any]:
    """Measure gradients, then scale them; return the norms of each part."""
    gradients, backend, arrays = taken
    if backend.concrete:
        asked = replace(clipping, max_norm=thresholds)
        made = decide(backend, arrays, asked, gradients.names, layout=layout, holders=holders)
        norms = left_norms(backend, layout, made.norm, arrays, gradients.grads)
        taken.scale(made)
        return norms
    if holders.together is not None:
        return _clip_measured(taken, layout, thresholds, clipping, holders, holders.together)
    if isinstance(layout, Groups) and isinstance(thresholds, Each):
        found = _clip_with_few_operations(taken, layout, thresholds, taken.cleared(clipping), holders)
        if found is not None:
            return found
    return _clip_one_by_one(taken, layout, thresholds, clipping, holders)


def _clip_one_by_one(
    taken: Taken, layout: Several, thresholds: Each | Following, clipping: Clipping, holders: Holders
) -> list[Any]:
    backend = taken.backend
    made, norms = [], []
    for number, (indices, scope) in enumerate(layout.parts):
        part = taken.chosen(indices)
        asked = replace(clipping, max_norm=thresholds.of_part(backend, layout, number, clipping.order))
        decision = decide(backend, part.arrays, asked, part.gradients.names, layout=scope, holders=holders)
        made.append((part, decision))
        norms += left_norms(backend, scope, decision.norm, part.arrays, part.gradients.grads, holders)
    for part, decision in made:
        part.scale(decision)
    return norms


def _clip_measured(
    taken: Taken,
    layout: Several,
    thresholds: Each | Following,
    clipping: Clipping,
    holders: Holders,
    together: Together,
) -> list[Any]:
    """Clip part by part on a device, with norms that all processes have measured together."""
    gradients, backend, arrays = taken
    clipping = taken.cleared(clipping)
    if clipping.nonfinite.zeroes:
        arrays = backend.without_nonfinite(arrays)
    norm, max_norms = measured(backend, arrays, thresholds, layout, clipping.order, together)
    if clipping.nonfinite.raises and not together.finite(backend):
        holders.raise_nonfinite(backend, arrays, gradients.names())
    if isinstance(layout, Groups) and isinstance(thresholds, Each):
        found = _clip_with_few_operations(taken, layout, thresholds, clipping, Measured(norm))
        if found is not None:
            return found
    norms = []
    for number, (indices, scope) in enumerate(layout.parts):
        part, own = taken.chosen(indices), part_of(layout, norm, number)
        max_norm = max_norms[number] if isinstance(thresholds, Each) else entries_of(layout, max_norms, number)
        asked = replace(clipping, max_norm=max_norm)
        decision = decide(backend, part.arrays, asked, gradients.names, layout=scope, holders=Measured(own))
        part.scale(decision)
        norms += left_norms(backend, scope, own, part.arrays, part.gradients.grads)
    return norms


def _clip_with_few_operations(
    taken: Taken, layout: Groups, thresholds: Each, clipping: Clipping, holders: Holders
) -> list[Any] | None:
    """Clip all groups together; return None, with nothing changed, if that is not possible."""
    backend, each = taken.backend, thresholds.values
    if layout.count < 2 or backend.multi_tensor(taken.arrays) is None:
        return None
    mine = taken.chosen([index for group in layout.groups for index in group])
    consecutive = Groups.consecutive(layout.groups)
    known = all(isinstance(threshold, float) for threshold in each)
    max_norms = as_vector(each) if known else backend.stacked([backend.scalar(one, ()) for one in each])
    asked = replace(clipping, max_norm=max_norms)
    made = decide(backend, mine.arrays, asked, mine.gradients.names, layout=consecutive, holders=holders)
    if not isinstance(made.coefficient, OneFactor):
        return None
    norms = left_norms(backend, consecutive, made.norm, mine.arrays, mine.gradients.grads)
    mine.scale(made)
    return norms
