"""The layers of an in-place call: each is a group of gradients with one norm and one threshold."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gradclip.arguments import check_thresholds, is_single_threshold
from gradclip.core.layouts import Groups
from gradclip.core.protocols import Backend
from gradclip.functional import layers_of, split_by
from gradclip.inplace.gradients import Gradients
from gradclip.parameters import ParameterList
from gradclip.tree import FlatTree
from gradclip.typing import Thresholds


@dataclass(frozen=True)
class Layerwise:
    """The unique layers of a call, as the indices of their gradients, and their thresholds.

    `arranged` puts the norms of the layers into the caller's structure.
    """

    groups: Groups
    thresholds: Sequence[Any]
    arranged: Callable[[Sequence[Any]], Any]

    @classmethod
    def of(cls, params: ParameterList, max_norm: Thresholds, backend: Backend, gradients: Gradients) -> "Layerwise":
        """Make each parameter, or each part of a tree, a layer.

        Raises ValueError if the thresholds do not fit, or if arrays of a tree, which cannot be replaced, share memory
        but are in different layers.
        """
        if gradients.tree is not None:
            return cls._of_tree(gradients.tree, max_norm, backend, gradients)
        grads = params.gradients
        max_norms: Sequence[object]
        if is_single_threshold(max_norm) and not getattr(max_norm, "shape", ()):
            max_norms = [max_norm] * len(grads)
        elif isinstance(max_norm, list | tuple):
            max_norms = max_norm
        else:
            raise TypeError(f"{_one_for_each(grads)}, got {max_norm!r:.80} of type {type(max_norm).__name__}.")
        if len(max_norms) != len(grads):
            raise ValueError(f"{_one_for_each(grads)}, got a list of {len(max_norms)}.")
        thresholds = check_thresholds(max_norms, backend)
        filled = [number for number, grad in enumerate(grads) if grad is not None]
        if len(filled) == len(gradients.grads):  # no parameter occurs twice
            return cls._different(Groups.each_alone(len(filled)), thresholds, filled, list, None)
        layers = [[] if grad is None else [owner] for owner, grad in zip(params.parameters, grads, strict=True)]
        return cls._once(layers, thresholds, list, None, gradients)

    @classmethod
    def _of_tree(cls, flat: FlatTree, max_norm: Thresholds, backend: Backend, gradients: Gradients) -> "Layerwise":
        single = is_single_threshold(max_norm)
        prefix, layers = layers_of(flat) if single else split_by(flat, max_norm)
        thresholds = check_thresholds([max_norm] * layers.count if single else prefix.leaves, backend)
        with backend.precision():
            zero = backend.leave_scalar(backend.zeros((), ()), "float32", flat.leaves)
        if len(gradients.grads) == len(flat.leaves) and not gradients.meeting:  # no array occurs twice
            filled = [number for number, group in enumerate(layers.groups) if group]
            layers = layers if len(filled) == layers.count else Groups([layers.groups[n] for n in filled])
            return cls._different(layers, thresholds, filled, prefix.arrange, zero)
        owners = [[flat.leaves[i] for i in group] for group in layers.groups]
        return cls._once(owners, thresholds, prefix.arrange, zero, gradients)

    @classmethod
    def _once(
        cls,
        layers: Sequence[Sequence[Any]],
        thresholds: Sequence[Any],
        rebuild: Callable[[list[Any]], Any],
        of_nothing: Any,
        gradients: Gradients,
    ) -> "Layerwise":
        """Return layers without duplicates, which have equal thresholds. `of_nothing` is the norm of an empty one."""
        keys = [frozenset(map(id, layer)) for layer in layers]
        unique = {key: layer for key, layer in zip(keys, layers, strict=True) if key}
        asked = dict(zip(keys, thresholds, strict=True))
        differ = any(asked[key] is not c and asked[key] != c for key, c in zip(keys, thresholds, strict=True) if key)
        if differ or len(frozenset().union(*unique)) < sum(map(len, unique)):
            raise ValueError(
                "a parameter or array occurs twice, in two layers or with two thresholds, so its threshold is "
                "ambiguous. Pass it once."
            )
        places = {key: place for place, key in enumerate(unique)}

        def arranged(norms: Sequence[Any]) -> Any:
            return rebuild([norms[places[key]] if key else of_nothing for key in keys])

        return cls(Groups(_indices(list(unique.values()), gradients)), [asked[key] for key in unique], arranged)

    @classmethod
    def _different(
        cls,
        groups: Groups,
        thresholds: Sequence[Any],
        filled: Sequence[int],
        rebuild: Callable[[list[Any]], Any],
        of_nothing: Any,
    ) -> "Layerwise":
        """Return the layers with these numbers, which have no gradient twice; the others are empty."""
        if len(filled) == len(thresholds):
            return cls(groups, thresholds, lambda norms: rebuild(list(norms)))

        def arranged(norms: Sequence[Any]) -> Any:
            every = [of_nothing] * len(thresholds)
            for number, norm in zip(filled, norms, strict=True):
                every[number] = norm
            return rebuild(every)

        return cls(groups, [thresholds[number] for number in filled], arranged)


def _indices(layers: Sequence[Sequence[Any]], gradients: Gradients) -> list[list[int]]:
    """Return the indices of each layer's gradients."""
    places = {id(owner): index for index, owner in enumerate(gradients.owners)}
    groups = [sorted({places[id(owner)] for owner in layer}) for layer in layers]
    layer_of = {index: number for number, group in enumerate(groups) for index in group}
    for meeting in () if gradients.apart else gradients.meeting:
        if len({layer_of[index] for index in meeting}) > 1:
            raise ValueError(
                f"{gradients.named(meeting)} share memory, so they cannot be scaled by different numbers in place. "
                "Pass copies, or call a function that returns new arrays, such as gradclip.clip_by_layer_norm."
            )
    return groups


def _one_for_each(grads: Sequence[Any]) -> str:
    return f"max_norm must be a number, or a list with one number for each of the {len(grads)} parameters, in order"
