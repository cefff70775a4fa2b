"""Clip ordinary gradients in place by several norms with one look, or by few kernels on their device."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import optree

from gradclip._src import look
from gradclip._src.core.layouts import Groups, Several
from gradclip._src.core.nonfinite import Nonfinite
from gradclip._src.core.norms import Order
from gradclip.typing import Ord, Parameters, Policy, Threshold, Thresholds

Given = look.Look | look.OnDevice


def clip_at_once(
    parameters: Parameters,
    settings: tuple[Ord, Policy],
    layout_of: Callable[[Sequence[Any]], Several | None],
    thresholds_of: Callable[[Given, Several, Order], Any],
) -> Any:
    """Clip gradients that no other process shares; return their norms in the caller's structure.

    `settings` are the order and the policy. `layout_of` returns the layout of the gradients, `thresholds_of` one
    threshold, or one for each norm, or None. None, with nothing changed, if one look does not settle all norms.
    """
    given = look.gradients(parameters)
    if given is None or len(set(map(id, given.leaves))) < len(given.leaves):  # an empty one may be listed twice
        return None
    order, policy, layout = Order.parse(settings[0]), Nonfinite.named(settings[1]), layout_of(given.leaves)
    if layout is None:
        return None
    if not isinstance(given, look.Look):
        thresholds = thresholds_of(given, layout, order) if isinstance(layout, Groups) else None
        norms = None if thresholds is None else given.clip_each_(thresholds, order, policy)
        return None if norms is None else _arranged(parameters, norms, given)
    thresholds = thresholds_of(given, layout, order) if given.kernels.writable else None
    norm = None if thresholds is None else given.clip_several_(layout, thresholds, order)
    return None if norm is None else _arranged(parameters, given.left(layout, norm), given)


def numbers(parameters: Parameters, max_norm: Thresholds, given: Given, layout: Several, _: Order) -> Any:
    """Return thresholds that are numbers: one for all gradients, or one for each. None if they are not known."""
    found = _thresholds(parameters, max_norm, given)
    if found is None or not isinstance(given, look.Look):
        return found
    return layout.each(found) if isinstance(found, list) else np.array([found], float)


def following(
    parameters: Parameters,
    weights: object,
    both: tuple[Threshold, Threshold],
    given: Given,
    layout: Several,
    order: Order,
) -> Any:
    """Return thresholds that follow the norms of weights of the same shapes. None if they are not ordinary."""
    clipping, eps = map(look.known_threshold, both)
    if clipping is None or eps is None or isinstance(layout, Groups) or not isinstance(given, look.Look):
        return None
    listed = _listed(parameters)
    beside = listed if weights is None else weights
    if not isinstance(beside, list | tuple) or len(beside) != len(listed) or _is_tree(given):
        return None
    if len(listed) > len(given.leaves):
        beside = [weight for weight, owner in zip(beside, listed, strict=True) if owner.grad is not None]
    return given.following(beside, layout, order, (clipping, eps))


def _listed(parameters: Any) -> Sequence[Any]:
    """Return the parameters as a list."""
    if isinstance(parameters, Mapping):
        return list(parameters.values())
    return parameters if isinstance(parameters, list | tuple) else [parameters]


def _thresholds(parameters: Parameters, max_norm: Thresholds, given: Given) -> Any:
    """Return one threshold for all gradients, or a list with one for each; None if they are not known."""
    if isinstance(max_norm, list | tuple):
        listed = _listed(parameters)
        known = look.known_thresholds(max_norm) if len(max_norm) == len(listed) and not _is_tree(given) else None
        if known is None or len(known) == len(given.leaves):
            return known
        return [limit for limit, owner in zip(known, listed, strict=True) if owner.grad is not None]
    threshold = look.known_threshold(max_norm)
    return threshold if threshold is not None or isinstance(given, look.Look) else given.threshold(max_norm)


def _is_tree(given: Given) -> bool:
    """Say whether the gradients themselves were passed, as a tree of NumPy arrays."""
    return isinstance(given.leaves[0], np.ndarray)


def _arranged(parameters: Parameters, norms: Sequence[Any], given: Given) -> Any:
    """Return the norms in the structure of the parameters: None where there is no gradient."""
    if _is_tree(given):
        return optree.tree_unflatten(optree.tree_structure(parameters), norms)
    listed = _listed(parameters)
    if len(listed) == len(norms):
        return list(norms)
    found = iter(norms)
    return [None if owner.grad is None else next(found) for owner in listed]
