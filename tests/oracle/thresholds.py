"""Thresholds that follow, monitors, and the self-test of private sums."""

import math

import numpy as np

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
    return gradclip.QuantileThreshold(window=drawing.one_of(rng, (1, 3, 128)), **options)


def gradients_of_steps(given):
    """Yield the gradients of several steps: those of the case, multiplied by powers of two."""
    for _ in range(STEPS):
        scale = 2.0 ** drawing.one_of(given.rng, SCALES)
        yield [given.engine.from_numpy((x * scale).astype(x.dtype)) for x in given.leaves[0]]


def following(given):
    """Clip several steps to a threshold that follows, and say what it counted."""
    above = drawing.one_of(given.rng, (math.inf, math.inf, 1.0, 4.0))
    max_norm, seen = gradclip.AdaptiveNorm(rule(given), skip_above=above), []
    for arrays in gradients_of_steps(given):
        holders = [given.holder(x) for x in arrays]
        norm = gradclip.clip_grad_norm_(holders, max_norm, **given.options())
        seen.append([norm, max_norm.norm, max_norm.threshold, [one.grad for one in holders]])
    restored = gradclip.AdaptiveNorm(max_norm.rule)
    restored.load_state_dict(max_norm.state_dict())
    counts = [max_norm.steps, max_norm.clipped, max_norm.skipped, repr(max_norm)]
    return [seen, counts, max_norm.max_norm, max_norm.history, restored.history, max_norm.state_dict()]


def quantile(given):
    """Let a history follow norms by hand, for one norm or for several layers at once."""
    drawn, layers = rule(given), given.case.index % 3 == 0
    shape = (2,) if layers else ()
    like = given.engine.from_numpy(np.zeros((), drawing.numpy_dtype(given.real_dtype)))

    def steps(norms):
        history = drawn.init(like, shape)
        seen = []
        for place in range(STEPS):
            history = drawn.observe(history, norms[place])
            seen.append(drawn.max_norm(history))
        return seen, history

    numbers = drawing.real_values(given.rng, "float32", STEPS * (2 if layers else 1), given.case.values)
    norms = given.engine.from_numpy(np.abs(numbers).astype(np.float32).reshape(STEPS, *shape))
    return [given.engine.over(steps)(norms), drawn.recovery_steps, repr(drawn)]


def private(given):
    """Let a private threshold follow fractions."""
    drawn = gradclip.PrivateQuantile(
        target=drawing.one_of(given.rng, (0.25, 0.5, 0.9)),
        learning_rate=drawing.one_of(given.rng, (0.25, 1.0, 10.0)),
        initial=1.0,
        lower=drawing.one_of(given.rng, (2.0**-20, 0.75)),
        upper=drawing.one_of(given.rng, (4.0, 1e30)),
    )

    def steps(fractions):
        state, seen = drawn.init(fractions), []
        for place in range(STEPS):
            state = drawn.observe_fraction(state, fractions[place])
            seen.append([drawn.max_norm(state), state])
        return seen

    drawn_fractions = (given.rng.randint(-8, 24, STEPS) / 16).astype(np.float32)
    if given.case.values == "nan":
        drawn_fractions[2] = np.nan
    return [given.engine.over(steps)(given.engine.from_numpy(drawn_fractions)), drawn.gradient_noise(1.0, 16.0)]


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
    max_norm, held = gradclip.AdaptiveNorm(rule(given), skip_above=4.0), []
    for arrays in gradients_of_steps(given):
        holders = [given.holder(x) for x in arrays]
        norm = gradclip.clip_grad_norm_(holders, max_norm, monitor=monitor, **given.options())
        held.append([norm, [one.grad for one in holders]])
    return [held, monitor.records, monitor.counts, monitor.layers]


def check_sensitivity(given):
    """Test a sum that keeps its promise, or one that does not."""
    examples = given.engine.from_numpy(drawing.leaf(given.rng, given.real_dtype, (5, 3), "ordinary"))
    factor = drawing.one_of(given.rng, (1.0, 1.0, 1.5))

    def clipped(batch):
        return gradclip.per_example_clip(batch, 1.0)[0] * factor

    found = gradclip.check_sensitivity(clipped, examples, 1.0 + 2.0**-10, trials=1, seed=given.case.index)
    return [found.sensitivity, found.cases, str(found)]


CALLS = {
    "AdaptiveNorm": following,
    "Monitor": monitored,
    "Monitor of AdaptiveNorm": monitored_following,
}
RULES = {"QuantileThreshold": quantile, "PrivateQuantile": private}
SELF_TEST = {"check_sensitivity": check_sensitivity}
