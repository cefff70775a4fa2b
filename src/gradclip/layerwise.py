"""Which gradients of an in-place call are a layer, to which threshold, and how the norms of layers are handed out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gradclip.arguments import check_threshold, is_single_threshold
from gradclip.gradients import Gradients
from gradclip.members import Members
from gradclip.tree import flatten


@dataclass(frozen=True)
class Layerwise:
    """Layers, each once: the gradients in each and its threshold; `arranged` makes of their norms what is returned."""

    layers: Sequence[Sequence[Any]]
    thresholds: Sequence[Any]
    arranged: Callable[[Sequence[Any]], Any]

    @classmethod
    def of(cls, members: Members, max_norm: Any) -> "Layerwise":
        """Return the layers of parameters, each its own, or of a tree. Raises ValueError for other thresholds."""
        if members.tree is not None:
            return cls._of_tree(members.tree, max_norm)
        grads, single = members.gradients, is_single_threshold(max_norm)
        max_norms = [max_norm] * len(grads) if single else list(max_norm)
        if len(max_norms) != len(grads):
            raise ValueError(
                f"max_norm must be a number, or a list with one for each of the {len(grads)} parameters, got a list of "
                f"{len(max_norms)}."
            )
        return cls._once([[] if grad is None else [grad] for grad in grads], max_norms, list)

    @classmethod
    def _of_tree(cls, tree: Any, max_norm: Any) -> "Layerwise":
        flat = flatten(tree)
        if is_single_threshold(max_norm):
            return cls._once([[leaf] for leaf in flat.leaves], [max_norm] * len(flat.leaves), flat.rebuild)
        prefix, groups = flat.split_by(max_norm)
        return cls._once([[flat.leaves[i] for i in group] for group in groups], prefix.leaves, prefix.rebuild)

    @classmethod
    def _once(
        cls, layers: Sequence[Sequence[Any]], max_norms: Sequence[Any], rebuild: Callable[[list[Any]], Any]
    ) -> "Layerwise":
        """Return layers without those that are others again, which must have the same threshold."""
        keys = [frozenset(map(id, layer)) for layer in layers]
        unique = {key: layer for key, layer in zip(keys, layers, strict=True) if key}
        asked = dict(zip(keys, map(check_threshold, max_norms), strict=True))
        differ = any(asked[key] is not c and asked[key] != c for key, c in zip(keys, max_norms, strict=True) if key)
        if differ or len(frozenset().union(*unique)) < sum(map(len, unique)):
            raise ValueError(
                "a gradient occurs twice, in two layers or with two thresholds, so that it is not clear what it is "
                "clipped to. Pass it once."
            )
        places = {key: place for place, key in enumerate(unique)}

        def arranged(norms: Sequence[Any]) -> Any:
            return rebuild([norms[places[key]] if key else None for key in keys])

        return cls(list(unique.values()), [asked[key] for key in unique], arranged)

    def among(self, gradients: Gradients) -> list[list[int]]:
        """Return the indices of each layer's gradients. Raises ValueError where some are views of others."""
        places = {id(grad): index for index, grad in enumerate(gradients.held)}
        if any(id(grad) not in places for layer in self.layers for grad in layer):
            raise ValueError(
                "two gradients are views of the same memory, so they cannot be layers of their own. Pass one of them."
            )
        return [sorted({places[id(grad)] for grad in layer}) for layer in self.layers]
