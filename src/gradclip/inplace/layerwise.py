"""The layers of an in-place call: each is a group of gradients with one norm and one threshold."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradclip.arguments import check_threshold, is_single_threshold
from gradclip.core.protocols import Backend
from gradclip.leaves import counted
from gradclip.parameters import ParameterList
from gradclip.typing import Thresholds

if TYPE_CHECKING:
    from gradclip.inplace.gradients import Gradients


@dataclass(frozen=True)
class Layerwise:
    """The unique layers of a call and their thresholds. `arranged` puts their norms into the caller's structure.

    Each layer holds the owners of its gradients: parameters, or the arrays of a tree.
    """

    layers: Sequence[Sequence[Any]]
    thresholds: Sequence[Any]
    arranged: Callable[[Sequence[Any]], Any]

    @classmethod
    def of(cls, params: ParameterList, max_norm: Thresholds, backend: Backend) -> "Layerwise":
        """Make each parameter, or each part of a tree, a layer. Raises ValueError if the thresholds do not fit."""
        if params.tree is not None:
            return cls._of_tree(params.tree, max_norm, backend)
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
        layers = [[] if grad is None else [owner] for owner, grad in zip(params.parameters, grads, strict=True)]
        return cls._once(layers, max_norms, backend, list)

    @classmethod
    def _of_tree(cls, tree: object, max_norm: Thresholds, backend: Backend) -> "Layerwise":
        flat, single = counted(tree), is_single_threshold(max_norm)
        prefix, groups = flat.each_alone() if single else flat.split_by(max_norm)
        thresholds = [max_norm] * len(groups) if single else prefix.leaves
        with backend.precision():
            zero = backend.leave_scalar(backend.zeros((), ()), "float32", flat.leaves)
        return cls._once(
            [[flat.leaves[i] for i in group] for group in groups], thresholds, backend, prefix.arrange, zero
        )

    @classmethod
    def _once(
        cls,
        layers: Sequence[Sequence[Any]],
        max_norms: Sequence[Any],
        backend: Backend,
        rebuild: Callable[[list[Any]], Any],
        of_nothing: Any = None,
    ) -> "Layerwise":
        """Return layers without duplicates, which have equal thresholds. `of_nothing` is the norm of an empty one."""
        keys = [frozenset(map(id, layer)) for layer in layers]
        unique = {key: layer for key, layer in zip(keys, layers, strict=True) if key}
        checked = [check_threshold(max_norm, backend=backend) for max_norm in max_norms]
        asked = dict(zip(keys, checked, strict=True))
        differ = any(asked[key] is not c and asked[key] != c for key, c in zip(keys, checked, strict=True) if key)
        if differ or len(frozenset().union(*unique)) < sum(map(len, unique)):
            raise ValueError(
                "a parameter or array occurs twice, in two layers or with two thresholds, so its threshold is "
                "ambiguous. Pass it once."
            )
        places = {key: place for place, key in enumerate(unique)}

        def arranged(norms: Sequence[Any]) -> Any:
            return rebuild([norms[places[key]] if key else of_nothing for key in keys])

        return cls(list(unique.values()), [asked[key] for key in unique], arranged)

    def among(self, gradients: "Gradients") -> list[list[int]]:
        """Return the indices of each layer's gradients.

        Raises ValueError if arrays of a tree, which cannot be replaced, share memory but are in different layers.
        """
        places = {id(owner): index for index, owner in enumerate(gradients.owners)}
        groups = [sorted({places[id(owner)] for owner in layer}) for layer in self.layers]
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
