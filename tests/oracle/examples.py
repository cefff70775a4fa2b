"""Calls on batches of examples."""

import numpy as np

import gradclip
from oracle import drawing

RULES = ("clip", "clip", "clip", "normalize", "automatic")
BATCHES = (1, 2, 5, 17)


def settings(given, *, thresholds=False):
    """Draw the settings that calls on examples share. 32-bit JAX has no sums that are wider."""
    rng, found = given.rng, {"rule": drawing.one_of(given.rng, RULES), "nonfinite": given.case.nonfinite}
    narrow = given.case.framework in ("jax", "jax-jit")
    if rng.randint(4) == 0 and not thresholds:
        found |= {"per_layer": True, "uniform": bool(rng.randint(2))}
    if rng.randint(8) == 0 and not narrow:
        found |= {"grid": 2**12, "nonfinite": found["nonfinite"].replace("propagate", "skip")}
    elif rng.randint(4) == 0:
        found["sum_dtype"] = "float32" if narrow else drawing.one_of(rng, ("float32", "float64"))
    if found["rule"] == "automatic":
        found["gamma"] = 0.25
    return found


def batch_of(given, batch):
    """Return gradients of examples, of which the last may be spoiled."""
    shapes = [(batch, *x.shape[:2]) for x in given.leaves[0]][:4]
    dtypes = [str(x.dtype) for x in given.leaves[0]][:4]
    kinds = [given.case.values] * len(shapes)
    return [drawing.leaf(given.rng, *one) for one in zip(dtypes, shapes, kinds, strict=True)]


def mask_of(given, batch):
    """Return no mask, or one of the framework, or a list."""
    drawn = given.rng.randint(0, 2, batch).astype(bool)
    return drawing.one_of(given.rng, (None, None, given.engine.from_numpy(drawn), drawn.tolist()))


def per_example_clip(given):
    """Clip and sum gradients of examples, with a threshold for all or for each of the layers."""
    batch = drawing.one_of(given.rng, BATCHES)
    made = batch_of(given, batch)
    tree = drawing.in_container([given.engine.from_numpy(x) for x in made], given.container)
    mask, each = mask_of(given, batch), given.rng.randint(4) == 0
    max_norm = drawing.prefix_of(tree, given.number) if each else given.max_norm()
    options = settings(given, thresholds=each)
    if given.rng.randint(8) == 0 and not {"per_layer", "grid"} & set(options):
        options["to_unit"] = True
    run = given.engine.over(lambda tree: gradclip.per_example_clip(tree, max_norm, mask=mask, **options))
    return run(tree)


def loss(params, x):
    """Return a loss whose gradient holds the numbers of the example, exactly."""
    return (params["w"] * x).sum() + (params["b"] * x[0]).sum()


def tensorflow_loss(params, x):
    import tensorflow as tf

    return tf.reduce_sum(params["w"] * x) + params["b"] * x[0]


def drawn_batch(given):
    """Return parameters and a batch."""
    count, batch = drawing.one_of(given.rng, (1, 3, 17)), drawing.one_of(given.rng, BATCHES)
    x = given.engine.from_numpy(drawing.leaf(given.rng, given.real_dtype, (batch, count), given.case.values))
    ones = given.engine.from_numpy(np.ones(count, drawing.numpy_dtype(given.real_dtype)))
    return {"w": ones, "b": given.engine.from_numpy(np.ones((), drawing.numpy_dtype(given.real_dtype)))}, x, batch


def call_settings(given):
    """Draw the settings of functions that clip what they compute for each example."""
    rng = given.rng
    found = settings(given) | {"keep_batch_dim": False}
    found["microbatch_size"] = drawing.one_of(rng, (None, None, 1, 2, 4))
    found["pad_to"] = drawing.one_of(rng, (None, None, 17))
    found["normalize_by"] = 1.0 if "grid" in found else drawing.one_of(rng, (1.0, 1.0, 4.0))
    found["return_norms"] = bool(rng.randint(2))
    found["method"] = drawing.one_of(rng, ("materialize", "materialize", "materialize", "loop"))
    return found


def clipped_grad(given):
    params, x, batch = drawn_batch(given)
    of = tensorflow_loss if given.case.framework.startswith("t") and "tensorflow" in type(x).__module__ else loss
    mask, options = mask_of(given, batch), call_settings(given)
    max_norm = given.max_norm()
    function = gradclip.clipped_grad(of, max_norm, **options)
    return [given.engine.over(lambda params, x: function(params, x, mask=mask))(params, x), function.sensitivity()]


def clipped_fun(given):
    _, x, batch = drawn_batch(given)
    mask, options = mask_of(given, batch), call_settings(given)
    function = gradclip.clipped_fun(lambda x: {"a": x * 2, "b": x[0]}, given.max_norm(), **options)
    return [given.engine.over(lambda x: function(x, mask=mask))(x), function.sensitivity()]


def clipped_sum_sensitivity(given):
    """Ask for a sensitivity in all its settings; there are no arrays."""
    rng = given.rng
    options = {
        "relation": drawing.one_of(rng, ("add_or_remove_one", "replace_one", "zero_out")),
        "rule": drawing.one_of(rng, RULES),
        "per_layer": bool(rng.randint(2)),
        "nonfinite": given.case.nonfinite,
        "normalize_by": drawing.one_of(rng, (1.0, 4.0, 3.0)),
        "batch_size": drawing.one_of(rng, (None, 7, 1_000)),
        "sum_dtype": drawing.one_of(rng, ("float32", "float64")),
        "grid": drawing.one_of(rng, (None, None, 1_024)),
        "elements": drawing.one_of(rng, (None, 10, 12_345)),
        "partial_sums": drawing.one_of(rng, (1, 2, 8)),
        "microbatches": drawing.one_of(rng, (1, 3)),
    }
    found = gradclip.clipped_sum_sensitivity(given.number(), **options)
    return [found, options]


CALLS = {"per_example_clip": per_example_clip, "clipped_grad": clipped_grad, "clipped_fun": clipped_fun}
NUMBERS = {"clipped_sum_sensitivity": clipped_sum_sensitivity}
