"""The same gradients passed in other ways, beside a plain list of tensors, which comes first.

With a layer without a gradient, one gradient in bfloat16, names, a parameter group, a tensor as the threshold, NumPy
arrays.
"""

from functools import partial

import torch

import gradclip

COUNT, ELEMENTS, SHAPE = 150, 1_000, (40, 25)
EXAMPLES = 8


def parameters(grads, frozen=0):
    """Return parameters with these gradients, after some without."""
    made = [torch.nn.Parameter(torch.zeros(SHAPE)) for _ in range(frozen)]
    for grad in grads:
        made.append(torch.nn.Parameter(torch.zeros_like(grad)))
        made[-1].grad = grad.clone()
    return made


def with_one_narrow(grads):
    return [grads[0].to(torch.bfloat16), *grads[1:]]


def by_name(listed):
    return {f"layer{number}": one for number, one in enumerate(listed)}


def prepared(call, held, grads):
    """Return a call, and what gives its gradients their numbers back."""

    def again():
        for kept, grad in zip(held, grads, strict=True):
            kept[...] = grad

    return call, again


def in_tensors(call, grads, *, frozen=0, narrow=False, spelled=list):
    """Return `call` on parameters in one of the ways to pass them, and what prepares it."""
    grads = with_one_narrow(grads) if narrow else grads
    made = parameters(grads, frozen)
    passed = spelled(made)
    held = [one.grad for one in made[frozen:]]
    return lambda: call(passed), lambda: torch._foreach_copy_(held, grads)


def in_place(function, **options):
    """Return the ways to call a function that clips in place."""

    def contenders(grads, max_norm):
        matrices = [grad.view(SHAPE) for grad in grads]
        to, scalar = partial(in_tensors, grads=matrices), torch.tensor(max_norm)
        arrays = [matrix.numpy() for matrix in matrices]
        copies = [array.copy() for array in arrays]
        # Adaptive clipping reads the weights of arrays beside them.
        weights = {"weights": [array * 0 for array in arrays]} if function is gradclip.adaptive_grad_clip_ else {}

        def call(passed):
            return function(passed, max_norm, **options)

        return {
            f"gradclip.{function.__name__}": to(call),
            "a layer without a gradient": to(call, frozen=1),
            "one gradient in bfloat16": to(call, narrow=True),
            "a dict of names": to(call, spelled=by_name),
            "pairs with names": to(call, spelled=lambda made: list(by_name(made).items())),
            "a parameter group": to(call, spelled=lambda made: [{"params": made}]),
            "a tensor as the threshold": to(lambda passed: function(passed, scalar, **options)),
            "a tree of NumPy arrays": prepared(lambda: function(copies, max_norm, **weights), copies, arrays),
        }

    return contenders


def contenders_of(call, name, grads, arrays, max_norm):
    """Return the ways to call a function of a tree."""
    narrow, named, scalar = with_one_narrow(grads), by_name(grads), torch.tensor(max_norm)
    return {
        f"gradclip.{name}": lambda: call(grads, max_norm),
        "a None among the leaves": lambda: call([None, *grads], max_norm),
        "one gradient in bfloat16": lambda: call(narrow, max_norm),
        "a dict of names": lambda: call(named, max_norm),
        "a tensor as the threshold": lambda: call(grads, scalar),
        "a list of NumPy arrays": lambda: call(arrays, max_norm),
    }


def functional(function):
    """Return the ways to call a function that returns new arrays."""

    def contenders(grads, max_norm):
        matrices = [grad.view(SHAPE) for grad in grads]
        arrays = [matrix.numpy() for matrix in matrices]
        return contenders_of(function, function.__name__, matrices, arrays, max_norm)

    return contenders


def adaptive(grads, clipping):
    """Return the ways to call `gradclip.adaptive_grad_clip`, relative to weights of zeros."""
    matrices = [grad.view(SHAPE) for grad in grads]
    arrays = [matrix.numpy() for matrix in matrices]
    weights = {
        kind: (made, by_name(made), [None, *made])
        for kind, made in ((torch.Tensor, [0 * x for x in matrices]), (object, [0 * x for x in arrays]))
    }

    def call(tree, clipping):
        leaf = tree["layer0"] if isinstance(tree, dict) else tree[-1]
        plain, named, with_none = weights[torch.Tensor if isinstance(leaf, torch.Tensor) else object]
        beside = named if isinstance(tree, dict) else plain if len(tree) == COUNT else with_none
        return gradclip.adaptive_grad_clip(tree, beside, clipping=clipping)

    return contenders_of(call, "adaptive_grad_clip", matrices, arrays, clipping)


def measured(function):
    """Return the ways to call a function that only measures."""

    def contenders(grads, _):
        arrays = [grad.numpy() for grad in grads]
        found = contenders_of(lambda tree, _: function(tree), function.__name__, grads, arrays, 1.0)
        del found["a tensor as the threshold"]
        return found

    return contenders


def per_example(grads, max_norm):
    """Return the ways to call `gradclip.per_example_clip`."""
    batches = [grad.view(EXAMPLES, -1) for grad in grads]
    found = contenders_of(
        gradclip.per_example_clip, "per_example_clip", batches, [batch.numpy() for batch in batches], max_norm
    )
    mask = torch.ones(EXAMPLES, dtype=torch.bool)
    return {**found, "mask=": lambda: gradclip.per_example_clip(batches, max_norm, mask=mask)}


WORKLOADS = {
    "ways, in place": in_place(gradclip.clip_grad_norm_),
    "ways, in place, by layer": in_place(gradclip.clip_grad_layer_norm_),
    "ways, in place, by unit": in_place(gradclip.clip_grad_unit_norm_),
    "ways, in place, adaptive": in_place(gradclip.adaptive_grad_clip_),
    "ways, functional": functional(gradclip.clip_by_global_norm),
    "ways, functional, by layer": functional(gradclip.clip_by_layer_norm),
    "ways, functional, by unit": functional(gradclip.clip_by_unit_norm),
    "ways, functional, adaptive": adaptive,
    "ways, norms by layer": measured(gradclip.layer_norms),
    "ways, norm": measured(gradclip.global_norm),
    "ways, examples": per_example,
}
"""Calls on COUNT arrays of ELEMENTS elements, by name: functions of the gradients and the threshold."""
ONLY_MEASURE = {"ways, norms by layer", "ways, norm"}
