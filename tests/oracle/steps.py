"""Clipping within an optimizer's step and within a backward pass, in PyTorch."""

import gradclip
from oracle import drawing
from oracle.thresholds import gradients_of_steps, rule

MAKE = ("SGD", "momentum", "Adam", "AdamW", "Adagrad")


def optimizer(name, parameters):
    import torch

    made = {
        "SGD": lambda: torch.optim.SGD(parameters, lr=0.5, fused=True),
        "momentum": lambda: torch.optim.SGD(parameters, lr=0.5, momentum=0.5, fused=True),
        "Adam": lambda: torch.optim.Adam(parameters, lr=0.5, fused=True),
        "AdamW": lambda: torch.optim.AdamW(parameters, lr=0.5, fused=True),
        "Adagrad": lambda: torch.optim.Adagrad(parameters, lr=0.5, fused=True),
    }
    return made[name]()


def parameters_of(given):
    """Return parameters of ones in the dtypes and shapes of the leaves that can have gradients."""
    import torch

    floating = [x for x in given.arrays[0] if x.is_floating_point()]
    if not floating:
        floating = [torch.ones(3)]
    return [torch.nn.Parameter(torch.ones(tuple(x.shape), dtype=x.dtype)) for x in floating[:3]]


def threshold_of(given):
    """Draw a threshold: a number, a scalar, or one that follows."""
    if given.rng.randint(4):
        return given.max_norm()
    return gradclip.AdaptiveNorm(rule(given), skip_above=4.0)


def fold_into(given):
    """Take some steps of a fused optimizer that clips."""
    from gradclip.integrations.torch import fold_into

    parameters = parameters_of(given)
    name = drawing.one_of(given.rng, MAKE)
    stepping = optimizer(name, parameters)
    options = given.options()
    if given.rng.randint(8):
        options["nonfinite"] = options["nonfinite"].replace("zero", "skip")
    folded = fold_into(stepping, threshold_of(given), **options)
    seen = [name]
    for _ in range(3):
        for one in parameters:
            dtype = str(one.dtype).removeprefix("torch.")
            drawn = drawing.leaf(given.rng, dtype, tuple(one.shape), given.case.values)
            one.grad = given.engine.from_numpy(drawn) if given.rng.randint(6) else None
        stepping.step()
        seen.append([folded.norm, [one.grad for one in parameters], [one.detach().clone() for one in parameters]])
    folded.remove()
    return seen


def clip_in_backward(given):
    """Run backward passes that clip each gradient as soon as it is there."""
    from gradclip.integrations.torch import clip_in_backward

    parameters = dict(zip("abc", parameters_of(given), strict=False))
    given.holders = list(parameters.values())
    each = {name: given.max_norm() for name in parameters}
    thresholds = each if given.rng.randint(3) == 0 else given.max_norm()
    clipping = clip_in_backward(parameters, thresholds, **given.options())
    seen = [dict(clipping.thresholds)]
    for _ in range(2):
        for one in parameters.values():
            dtype = str(one.dtype).removeprefix("torch.")
            factor = given.engine.from_numpy(drawing.leaf(given.rng, dtype, tuple(one.shape), given.case.values))
            one.grad = None
            (one * factor).sum().backward()
        seen.append([dict(clipping.norms), [one.grad.clone() for one in parameters.values()]])
    clipping.remove()
    return seen


def clipper_of_quantiles(given):
    """Clip several steps as the package autoclip does."""
    from gradclip.integrations.autoclip import QuantileClip

    together = bool(given.rng.randint(2))
    parameters, seen, clipper = [], [], None
    for arrays in gradients_of_steps(given):
        if clipper is None:
            parameters = [given.holder(x) for x in arrays]
            clipper = QuantileClip(parameters, quantile=0.5, history_length=3, global_threshold=together)
        for one, x in zip(parameters, arrays, strict=True):
            one.grad = x
        clipper.step()
        seen.append([one.grad.clone() for one in parameters])
    return seen


CALLS = {
    "integrations.torch.fold_into": fold_into,
    "integrations.torch.clip_in_backward": clip_in_backward,
    "integrations.autoclip.QuantileClip": clipper_of_quantiles,
}
