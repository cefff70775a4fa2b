"""Calls on trees of arrays."""

from types import SimpleNamespace

import gradclip
from oracle import drawing


def over_trees(function):
    """Return a call of `function(tree)` on each of the trees."""

    def call(given):
        run = given.engine.over(lambda tree: function(tree, given))
        return [run(tree) for tree in given.trees]

    return call


def with_threshold(function):
    """Return a call of `function(tree, max_norm, given)`; thresholds that are scalars are traced with the tree."""

    def call(given):
        max_norm = given.max_norm()
        if given.case.threshold == "scalar":
            run = given.engine.over(lambda tree, max_norm: function(tree, max_norm, given))
            return [run(tree, max_norm) for tree in given.trees]
        run = given.engine.over(lambda tree: function(tree, max_norm, given))
        return [run(tree) for tree in given.trees]

    return call


def with_thresholds(function):
    """Return the same, sometimes with a threshold for each of the layers."""

    def call(given):
        if given.rng.randint(3):
            return with_threshold(function)(given)
        each = drawing.prefix_of(given.tree, lambda: given.max_norm())
        run = given.engine.over(lambda tree: function(tree, each, given))
        return [run(tree) for tree in given.trees]

    return call


def unit_axis(given):
    return drawing.one_of(given.rng, (None, None, 0, -1, (0, 1)))


def clip_by_unit_norm(tree, max_norm, given):
    axis = unit_axis(given)
    return gradclip.clip_by_unit_norm(tree, max_norm, unit_axis=axis, **given.options())


def adaptive_grad_clip(given):
    axis, eps = unit_axis(given), drawing.one_of(given.rng, (1e-3, 0.5, 0.0))
    clipping = given.max_norm() if given.case.threshold != "number" else drawing.one_of(given.rng, (0.01, 0.25, 4.0))
    weights = [
        given.engine.from_numpy(drawing.leaf(given.rng, "float32", x.shape, "ordinary")) for x in given.leaves[0]
    ]
    params = drawing.in_container(weights, given.container)
    options = {"unit_axis": axis, **given.options()}
    run = given.engine.over(
        lambda tree, params: gradclip.adaptive_grad_clip(tree, params, clipping=clipping, eps=eps, **options)
    )
    return [run(tree, params) for tree in given.trees]


def layer_norms(tree, given):
    order = given.case.ord
    if given.case.index % 3:
        return gradclip.layer_norms(tree, order)
    return gradclip.layer_norms(tree, order, prefix=drawing.prefix_of(tree, lambda: 0))


def norm_at_most(tree, max_norm, given):
    return gradclip.norm_at_most(tree, max_norm, ord=given.case.ord)


def partial_norm(given):
    """Measure the leaves in two parts, and clip each."""
    leaves = given.arrays[0]
    parts = [leaves[:1], leaves[1:]]
    whole = sum(gradclip.partial_norm(part, given.case.ord) for part in parts)
    policy = given.case.nonfinite if given.rng.randint(8) == 0 else given.case.nonfinite.replace("zero", "drop")
    clipped = [whole.clip(part, given.max_norm(), nonfinite=policy) for part in parts]
    return [whole.to_json(), whole.norm, gradclip.PartialNorm.from_json(whole.to_json()).norm, clipped]


CALLS = {
    "global_norm": over_trees(lambda tree, given: gradclip.global_norm(tree, given.case.ord)),
    "layer_norms": over_trees(layer_norms),
    "clip_by_global_norm": with_threshold(
        lambda tree, max_norm, given: gradclip.clip_by_global_norm(tree, max_norm, **given.options())
    ),
    "clip_by_layer_norm": with_thresholds(
        lambda tree, max_norm, given: gradclip.clip_by_layer_norm(tree, max_norm, **given.options())
    ),
    "clip_by_value": with_threshold(lambda tree, max_value, given: gradclip.clip_by_value(tree, max_value)),
    "clip_by_unit_norm": with_thresholds(clip_by_unit_norm),
    "adaptive_grad_clip": adaptive_grad_clip,
}
ONLY_EAGER = {"norm_at_most": with_threshold(norm_at_most), "partial_norm": partial_norm}


# In place


def clip_grad_norm_(given):
    parameters = given.parameters()
    return gradclip.clip_grad_norm_(parameters, given.max_norm(), **given.options())


def each_or_one(given, parameters):
    """Return one threshold, or one for each of the parameters."""
    if given.rng.randint(3):
        return given.max_norm()
    if not given.holders:
        return drawing.prefix_of(parameters, lambda: given.max_norm())
    listed = isinstance(parameters, list) and not (parameters and isinstance(parameters[0], dict))
    return [given.max_norm() for _ in (parameters if listed else given.holders)]


def clip_grad_layer_norm_(given):
    parameters = given.parameters()
    return gradclip.clip_grad_layer_norm_(parameters, each_or_one(given, parameters), **given.options())


def clip_grad_unit_norm_(given):
    parameters = given.parameters()
    thresholds = each_or_one(given, parameters)
    return gradclip.clip_grad_unit_norm_(parameters, thresholds, unit_axis=unit_axis(given), **given.options())


def weights_beside(given, parameters):
    """Return weights for the arrays of a tree, or for each of the parameters."""
    if not given.holders:
        drawn = [drawing.leaf(given.rng, "float32", x.shape, "ordinary") for x in given.leaves[0]]
        return drawing.in_container(list(map(given.engine.from_numpy, drawn)), given.container)
    held = [*given.holders, *given.holders[:1]] if len(given.holders) < count_of(parameters) else given.holders
    shapes = [() if one.grad is None else tuple(one.grad.shape) for one in held]
    return [given.engine.from_numpy(drawing.leaf(given.rng, "float32", shape, "ordinary")) for shape in shapes]


def count_of(parameters):
    return len(parameters) if isinstance(parameters, list) else 0


def adaptive_grad_clip_(given):
    """Clip relative to weights: those of the parameters, or those passed."""
    parameters = given.parameters()
    clipping = given.max_norm() if given.case.threshold != "number" else drawing.one_of(given.rng, (0.01, 0.25, 4.0))
    for one in given.holders:
        if not isinstance(one, SimpleNamespace):
            one.data = given.engine.from_numpy(
                drawing.leaf(given.rng, str(one.dtype).removeprefix("torch."), tuple(one.shape), "ordinary")
            )
    weights = None
    if given.rng.randint(2) or not given.case.framework.startswith("torch"):
        weights = weights_beside(given, parameters)
    options = {"params": weights, "unit_axis": unit_axis(given), **given.options()}
    return gradclip.adaptive_grad_clip_(parameters, clipping, **options)


IN_PLACE = {
    "grad_norm": lambda given: gradclip.grad_norm(given.parameters(), given.case.ord),
    "clip_grad_norm_": clip_grad_norm_,
    "clip_grad_value_": lambda given: gradclip.clip_grad_value_(given.parameters(), given.max_norm()),
    "clip_grad_layer_norm_": clip_grad_layer_norm_,
    "clip_grad_unit_norm_": clip_grad_unit_norm_,
    "adaptive_grad_clip_": adaptive_grad_clip_,
}
