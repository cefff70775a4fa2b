"""Calls in place with several norms: those of layers, each a gradient or several, or of the units of each gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gradclip._src.core.decision import Clipping
from gradclip._src.core.layouts import Groups
from gradclip._src.core.protocols import Backend
from gradclip._src.distributed.processes import ONE_PROCESS, Processes, processes_of, telling
from gradclip._src.inplace.choice import others_left
from gradclip._src.inplace.gradients import Gradients, Taken, entered
from gradclip._src.passed.arguments import check_thresholds, is_single_threshold
from gradclip._src.passed.choice import choice_of
from gradclip._src.passed.groups import as_tuple
from gradclip._src.passed.leaves import layers_of, split_by
from gradclip._src.passed.parameters import ParameterList, reusable
from gradclip._src.tree import FlatTree
from gradclip._src.words import typed
from gradclip.typing import Integers, Meshes, Parameters, ProcessGroups, Thresholds, Where


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
