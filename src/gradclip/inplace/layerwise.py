"""The layers of an in-place call: each is a group of gradients with one norm and one threshold."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradclip.arguments import check_threshold, is_single_threshold
from gradclip.backends import Backend
from gradclip.parameters import ParameterList
from gradclip.tree import flatten
from gradclip.typing import Thresholds

if TYPE_CHECKING:
    from gradclip.inplace.gradients import Gradients


@dataclass(frozen=True)
class Layerwise:
    """The unique layers of a call and their thresholds. `arranged` puts their norms into the caller's structure."""

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
        return cls._once([[] if grad is None else [grad] for grad in grads], max_norms, backend, list)

    @classmethod
    def _of_tree(cls, tree: object, max_norm: Thresholds, backend: Backend) -> "Layerwise":
        flat = flatten(tree)
        if is_single_threshold(max_norm):
            return cls._once([[leaf] for leaf in flat.leaves], [max_norm] * len(flat.leaves), backend, flat.rebuild)
        prefix, groups = flat.split_by(max_norm)
        layers = [[flat.leaves[i] for i in group] for group in groups]
        return cls._once(layers, prefix.leaves, backend, prefix.rebuild)

    @classmethod
    def _once(
        cls,
        layers: Sequence[Sequence[Any]],
        max_norms: Sequence[Any],
        backend: Backend,
        rebuild: Callable[[list[Any]], Any],
    ) -> "Layerwise":
        """Return layers without duplicates, which must have equal thresholds."""
        keys = [frozenset(map(id, layer)) for layer in layers]
        unique = {key: layer for key, layer in zip(keys, layers, strict=True) if key}
        checked = [check_threshold(max_norm, backend=backend) for max_norm in max_norms]
        asked = dict(zip(keys, checked, strict=True))
        differ = any(asked[key] is not c and asked[key] != c for key, c in zip(keys, checked, strict=True) if key)
        if differ or len(frozenset().union(*unique)) < sum(map(len, unique)):
            raise ValueError(
                "a gradient occurs twice, in two layers or with two thresholds, so its threshold is ambiguous. Pass it "
                "once."
            )
        places = {key: place for place, key in enumerate(unique)}

        def arranged(norms: Sequence[Any]) -> Any:
            return rebuild([norms[places[key]] if key else None for key in keys])

        return cls(list(unique.values()), [asked[key] for key in unique], arranged)

    def among(self, gradients: "Gradients") -> list[list[int]]:
        """Return the indices of each layer's gradients. Raises ValueError if some are views of others."""
        places = {id(grad): index for index, grad in enumerate(gradients.held)}
        if any(id(grad) not in places for layer in self.layers for grad in layer):
            raise ValueError(
                "two gradients are views of the same memory, so they cannot be separate layers. Pass one of them."
            )
        return [sorted({places[id(grad)] for grad in layer}) for layer in self.layers]


def _one_for_each(grads: Sequence[Any]) -> str:
    return f"max_norm must be a number, or a list with one number for each of the {len(grads)} parameters, in order"
