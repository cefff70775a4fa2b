"""Clipping in place with thresholds that follow, with thresholds of parts of the parameters, and with monitors."""

import math

import gradclip
from oracle import drawing

STEPS = 6
SCALES = (-12, 0, 0, 0, 1, 3, 20)


def rule(given):
    """Draw a rule for a threshold that follows the norms."""
    rng = given.rng
    options = {"factor": drawing.one_of(rng, (1.0, 2.0, 0.5)), "quantile": drawing.one_of(rng, (0.0, 0.5, 0.9, 1.0))}
    if rng.randint(3) == 0:
        options |= {"lower": 0.25, "upper": 64.0, "initial": 2.0}
    return gradclip.QuantileRule(window=drawing.one_of(rng, (1, 3, 128)), **options)


def gradients_of_steps(given):
    """Yield the gradients of several steps: those of the case, multiplied by powers of two."""
    for _ in range(STEPS):
        scale = 2.0 ** drawing.one_of(given.rng, SCALES)
        yield [given.engine.from_numpy(multiplied(x, scale)) for x in given.leaves[0]]


def multiplied(array, scale):
    """Return the products. Of complex numbers NumPy gives zeros signs that differ with the processor's vectors."""
    if array.dtype.kind != "c":
        return (array * scale).astype(array.dtype)
    product = array.copy(order="K")
    product.real, product.imag = array.real * scale, array.imag * scale
    return product


def following(given):
    """Clip several steps to a threshold that follows, and say what it counted."""
    above = drawing.one_of(given.rng, (math.inf, math.inf, 1.0, 4.0))
    max_norm, seen = gradclip.AdaptiveThreshold(rule(given), skip_above=above), []
    for arrays in gradients_of_steps(given):
        holders = [given.holder(x) for x in arrays]
        norm = gradclip.clip_grad_norm_(holders, max_norm, **given.options())
        seen.append([norm, max_norm.norm, max_norm.max_norm, [one.grad for one in holders]])
    restored = gradclip.AdaptiveThreshold(max_norm.rule)
    restored.load_state_dict(max_norm.state_dict())
    counts = [max_norm.steps, max_norm.num_clipped, max_norm.num_skipped, repr(max_norm)]
    return [seen, counts, max_norm.next_max_norm, max_norm.history, restored.history, max_norm.state_dict()]


def monitored(given):
    """Clip several steps with a monitor, and read all that it has."""
    told = []
    monitor = gradclip.Monitor(
        capacity=drawing.one_of(given.rng, (3, 100)),
        fetch_every=drawing.one_of(given.rng, (1, 2, 100)),
        layers_every=drawing.one_of(given.rng, (0, 1, 2)),
        callback=lambda step, numbers: told.append([step, dict(numbers)]),
    )
    held, max_norm = [], given.max_norm()
    for arrays in gradients_of_steps(given):
        holders = [given.holder(x) for x in arrays]
        norm = gradclip.clip_grad_norm_(holders, max_norm, monitor=monitor, **given.options())
        held.append([norm, [one.grad for one in holders]])
    monitor.record(norm, max_norm, nonfinite=given.case.nonfinite)
    read = [monitor.records, monitor.counts, monitor.columns, monitor.layers, monitor.top_layers, repr(monitor)]
    return [held, read, told]


def monitored_following(given):
    """Clip to a threshold that follows, with a monitor."""
    monitor = gradclip.Monitor(layers_every=1)
    max_norm, held = gradclip.AdaptiveThreshold(rule(given), skip_above=4.0), []
    for arrays in gradients_of_steps(given):
        holders = [given.holder(x) for x in arrays]
        norm = gradclip.clip_grad_norm_(holders, max_norm, monitor=monitor, **given.options())
        held.append([norm, [one.grad for one in holders]])
    return [held, monitor.records, monitor.counts, monitor.layers]


def of_part(given):
    """Draw the threshold of a part."""
    if given.rng.randint(4):
        return given.max_norm()
    return gradclip.AdaptiveThreshold(rule(given), skip_above=drawing.one_of(given.rng, (math.inf, 1.0, 4.0)))


def of_groups(given, parameters):
    """Return parameter groups of which one or both have thresholds, and the threshold of what is left."""
    middle = given.rng.randint(len(parameters) + 1)
    first = {"params": parameters[:middle]} | ({"max_norm": of_part(given)} if given.rng.randint(2) else {})
    last = {"params": parameters[middle:], "max_norm": None if given.rng.randint(6) == 0 else of_part(given)}
    return drawing.one_of(given.rng, ([first, last | {"name": "head"}], [last, first])), of_part(given)


def of_patterns(given, parameters):
    """Return parameters with names, and patterns with thresholds; of a single name the second mostly matches none."""
    patterns = {"*0": of_part(given)}
    if len(given.arrays[0]) > 1 or given.rng.randint(6) == 0:
        patterns["*"] = None if given.rng.randint(6) == 0 else of_part(given)
    named = {f"layer{index}": one for index, one in enumerate(parameters)} if given.holders else parameters
    return named, dict(reversed(patterns.items())) if given.rng.randint(12) == 0 else patterns


def clipped_in_parts(of_parts, holders):
    """Return a call that clips parts of the parameters by norms of their own: several steps if a threshold follows."""

    def call(given):
        parameters, max_norm = of_parts(given, given.parameters(holders))
        own = max_norm.values() if isinstance(max_norm, dict) else [max_norm, *(x.get("max_norm") for x in parameters)]
        followed = [one for one in own if isinstance(one, gradclip.AdaptiveThreshold)]
        monitor = gradclip.Monitor(layers_every=1) if given.rng.randint(3) == 0 else None
        norms = [gradclip.clip_grad_norm_(parameters, max_norm, monitor=monitor, **given.options())]
        held = [one.grad for one in given.holders]
        for arrays in gradients_of_steps(given) if followed and given.holders else ():
            for one, gradient in zip([x for x in given.holders if x.grad is not None], arrays, strict=False):
                one.grad = gradient
            norms.append(gradclip.clip_grad_norm_(parameters, max_norm, monitor=monitor, **given.options()))
            held += [one.grad for one in given.holders]
        counts = [
            [one.history, one.steps, one.num_clipped, one.num_skipped, one.norm, one.max_norm] for one in followed
        ]
        read = monitor and [[one.records, one.counts, one.layers] for one in (monitor, *monitor.groups.values())]
        return [norms, held, counts, read]

    return call


CALLS = {
    "AdaptiveThreshold": following,
    "Monitor": monitored,
    "Monitor of AdaptiveThreshold": monitored_following,
    "max_norm of groups": clipped_in_parts(of_groups, ("list", "list", "list", "list", "frozen", "shared", "twice")),
    "max_norm of patterns": clipped_in_parts(of_patterns, ("list", "list", "frozen", "shared", "tree")),
}
