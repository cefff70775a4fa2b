"""The names of other libraries, and sparse gradients."""

import numpy as np

import gradclip
from oracle import drawing
from oracle.examples import drawn_batch, loss, mask_of


def order(given):
    return 2 if given.case.ord is None else given.case.ord


def torch_clip_grad_norm_(given):
    from gradclip.integrations.torch import clip_grad_norm_

    return clip_grad_norm_(given.parameters(), given.max_norm(), order(given), bool(given.rng.randint(6) == 0))


def torch_clip_grad_value_(given):
    from gradclip.integrations.torch import clip_grad_value_

    return clip_grad_value_(given.parameters(), given.max_norm())


def torch_get_total_norm(given):
    from gradclip.integrations.torch import clip_grads_with_norm_, get_total_norm

    norm = get_total_norm(given.arrays[0], order(given))
    clip_grads_with_norm_(given.parameters(), given.max_norm(), norm)
    return norm


def optax_update(given):
    """Update by one of the transformations of optax."""
    from gradclip.integrations import optax

    makes = {
        "clip_by_global_norm": lambda c: optax.clip_by_global_norm(c),
        "clip_by_global_norm_with_state": lambda c: optax.clip_by_global_norm_with_state(c),
        "clip": lambda c: optax.clip(c),
        "adaptive_grad_clip": lambda c: optax.adaptive_grad_clip(c),
        "clip_by_block_rms": lambda c: optax.clip_by_block_rms(c),
        "adaptive_clip_by_global_norm": lambda c: optax.adaptive_clip_by_global_norm(skip_above=4.0),
    }
    name, max_norm = drawing.one_of(given.rng, list(makes)), given.max_norm()

    def updated(tree):
        made = makes[name](max_norm)
        return made.update(tree, made.init(tree), tree)

    return [name, *(given.engine.over(updated)(tree) for tree in given.trees)]


def optax_examples(given):
    """Clip and sum gradients of examples as optax does."""
    from gradclip.integrations import optax

    batch = drawing.one_of(given.rng, (1, 5))
    tree = [
        given.engine.from_numpy(drawing.leaf(given.rng, "float32", (batch, *shape), given.case.values))
        for shape in ((3,), (), (2, 2))
    ]
    max_norm = given.max_norm()
    calls = (
        lambda tree: optax.per_example_global_norm_clip(tree, max_norm),
        lambda tree: optax.per_example_layer_norm_clip(tree, max_norm, uniform=bool(given.case.index % 2)),
    )
    return given.engine.over(drawing.one_of(given.rng, calls))(tree)


def tensorflow_names(given):
    """Call one of the functions of TensorFlow."""
    from gradclip.integrations import tensorflow

    leaves, max_norm = given.arrays[0], given.max_norm()
    axes = drawing.one_of(given.rng, (None, 0))
    calls = {
        "clip_by_global_norm": lambda: tensorflow.clip_by_global_norm([*leaves, None], max_norm),
        "global_norm": lambda: tensorflow.global_norm([*leaves, None]),
        "clip_by_norm": lambda: [tensorflow.clip_by_norm(x, max_norm, axes) for x in leaves],
        "clip_by_value": lambda: [tensorflow.clip_by_value(x, -max_norm, max_norm) for x in leaves],
        "clip_by_average_norm": lambda: [tensorflow.clip_by_average_norm(x, max_norm) for x in leaves],
    }
    name = drawing.one_of(given.rng, list(calls))
    return [name, calls[name]()]


def jax_privacy_names(given):
    """Clip a tree, or the gradient of a loss, as jax_privacy does."""
    from gradclip.integrations import jax_privacy

    max_norm, scaled, safe = given.number(), bool(given.rng.randint(2)), bool(given.rng.randint(3))
    if given.case.index % 2:
        run = given.engine.over(lambda tree: jax_privacy.clip_pytree(tree, max_norm, scaled, safe))
        return [run(tree) for tree in given.trees]
    params, x, batch = drawn_batch(given)
    function = jax_privacy.clipped_grad(
        loss, l2_clip_norm=max_norm, rescale_to_unit_norm=scaled, nan_safe=safe, keep_batch_dim=False
    )
    mask = mask_of(given, batch)
    padding = None if mask is None else ~np.asarray(mask)
    return [given.engine.over(lambda params, x: function(params, x, is_padding_example=padding))(params, x)]


def brainstate_clip_grad_norm(given):
    from gradclip.integrations.brainstate import clip_grad_norm

    max_norm = given.max_norm()
    run = given.engine.over(lambda tree: clip_grad_norm(tree, max_norm, order(given), return_norm=True))
    return [run(tree) for tree in given.trees]


def lucid_names(given):
    from gradclip.integrations import lucid

    holders = [given.holder(x) for x in given.arrays[0]]
    given.holders = holders
    norm = lucid.grad_norm(holders, order(given))
    return [norm, lucid.clip_grad_norm(holders, given.max_norm(), order(given), drawing.one_of(given.rng, (1e-7, 0.5)))]


def declearn_names(given):
    """Clip a vector of declearn."""
    from declearn.model.sklearn import NumpyVector

    from gradclip.integrations.declearn import L2Clipping, L2GlobalClipping

    made = drawing.one_of(given.rng, (L2Clipping, L2GlobalClipping))(given.number())
    return made.run(NumpyVector({f"layer{place}": x for place, x in enumerate(given.arrays[0])})).coefs


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
        "norm_at_most": lambda tree: gradclip.norm_at_most(tree, max_norm, given.case.ord),
        "clip_by_unit_norm": lambda tree: gradclip.clip_by_unit_norm(tree, max_norm, **given.options()),
    }
    name = drawing.one_of(given.rng, list(calls))
    return [name, calls[name](tree)]


EAGER_AND_JIT = {
    "integrations.optax": optax_update,
    "integrations.optax.per_example": optax_examples,
    "integrations.jax_privacy": jax_privacy_names,
    "integrations.brainstate": brainstate_clip_grad_norm,
}
TORCH = {
    "integrations.torch.clip_grad_norm_": torch_clip_grad_norm_,
    "integrations.torch.clip_grad_value_": torch_clip_grad_value_,
    "integrations.torch.get_total_norm": torch_get_total_norm,
}
