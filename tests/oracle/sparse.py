"""Calls on trees with a sparse gradient."""

import numpy as np

import gradclip
from oracle import drawing


def sparse_of(given, dense):
    """Return a sparse gradient with these rows, two of them the same, in the framework."""
    places = np.array([0, 3, 3, 1])[: len(dense)]
    if given.case.framework.startswith("jax"):
        from jax.experimental import sparse

        return sparse.BCOO((given.engine.from_numpy(dense), given.engine.from_numpy(places[:, None])), shape=(5, 3))
    if given.case.framework.startswith("t") and "torch" not in given.case.framework:
        import tensorflow as tf

        return tf.IndexedSlices(given.engine.from_numpy(dense), tf.constant(places), tf.constant([5, 3]))
    import torch

    return torch.sparse_coo_tensor(torch.from_numpy(places[None]), given.engine.from_numpy(dense), (5, 3))


def sparse_gradients(given):
    """Measure and clip a tree with a sparse gradient."""
    dense = drawing.leaf(given.rng, given.real_dtype, (drawing.one_of(given.rng, (1, 4)), 3), given.case.values)
    tree = [*given.arrays[0][:1], sparse_of(given, dense)]
    max_norm = given.max_norm()
    calls = {
        "global_norm": lambda tree: gradclip.global_norm(tree, given.case.ord),
        "clip_by_global_norm": lambda tree: gradclip.clip_by_global_norm(tree, max_norm, **given.options()),
        "clip_by_layer_norm": lambda tree: gradclip.clip_by_layer_norm(tree, max_norm, **given.options()),
        "clip_by_value": lambda tree: gradclip.clip_by_value(tree, max_norm),
        "norm_at_most": lambda tree: gradclip.norm_at_most(tree, max_norm, ord=given.case.ord),
        "clip_by_unit_norm": lambda tree: gradclip.clip_by_unit_norm(tree, max_norm, **given.options()),
    }
    name = drawing.one_of(given.rng, list(calls))
    return [name, calls[name](tree)]
