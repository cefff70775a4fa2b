"""The sentences of the advice."""

from collections.abc import Callable

import numpy as np

from gradclip._src.monitor.records import TINY, Columns, Step
from gradclip._src.monitor.trend import BEFORE, LEAST, SPIKE, Level, Losses

Proposal = Callable[[tuple[float, ...]], str]
NO_LOSS = "The loss was not recorded, so this cannot tell a healthy level from one that is too high."
_FEW_LOSSES = (
    f"Only {{}} finite losses were recorded. It takes {LEAST} to tell a healthy level from one that is too high."
)
RECORD = f"{NO_LOSS} Pass loss= to monitor.record, or call monitor.note(loss=...) before each clipping call."
STUCK = (
    "The threshold in use leaves less than a thousandth of each gradient. With SGD the steps are that much shorter, so "
    "the loss may stand still for that reason alone."
)
ON_RATES = (
    "With SGD, a threshold that clips every step acts as part of the learning rate. With Adam and others that divide "
    "by the size of the gradients, it changes little: lower the learning rate instead."
)
_ON_TINY = (
    "If gradients are scaled (by a GradScaler, or a loss that is a sum), unscale them before clipping. If one group of "
    "parameters is far larger than the others, give it a 'max_norm' of its own, or None to only measure it: see "
    "gradclip.clip_grad_norm_. Else raise max_norm."
)


def too_few(least: int, there: int) -> str:
    """Say how many steps there are, and how many are needed."""
    return f"This needs {least} steps with a finite norm above 0; there are {there}."


def guard(losses: Losses, *, held: bool) -> Proposal:
    """Return what proposes a threshold above a healthy level; `held` says that the level rose before it held."""
    sure = {"fell": "The level of the norms is healthy", "unknown": "The level of the norms is steady"}
    start = sure.get(losses.kind, "The norms are steady, but the loss did not fall")
    start = "The level of the norms rose, then held" if held else start
    return lambda values: f"{start}. To clip only spikes: max_norm = {values[0]:g}"


def guards(losses: Losses) -> Proposal:
    """Return what proposes two thresholds, above a level that fell far and above the one it fell to."""
    start = {"fell": "The level of the norms is healthy, but it fell far"}.get(losses.kind, "The norms fell far")
    return lambda values: (
        f"{start}. To clip only spikes: max_norm = {values[0]:g} from the start, {values[1]:g} from here on. Or one "
        "that follows: gradclip.AdaptiveThreshold(gradclip.QuantileRule())."
    )


def clip_every_step(values: tuple[float, ...]) -> str:
    """Propose thresholds below the level."""
    return f"The usual step is too long. Clip every step: {_in_order(values)}. Or lower the learning rate."


def lower_the_rate(values: tuple[float, ...]) -> str:
    """Propose a lower rate first."""
    return f"The usual step is too long. Lower the learning rate, or clip every step: {_in_order(values)}."


def perhaps_too_long(values: tuple[float, ...]) -> str:
    """Propose both kinds of thresholds."""
    return f"The usual step may be too long: the level is not steady. {_in_order(values).capitalize()}."


def rising(values: tuple[float, ...]) -> str:
    """Propose the level that a rising norm has reached."""
    return f"The level of the norms is rising. Stop it there: {_in_order(values)}."


def one_bad_step(nan: bool) -> Proposal:
    """Return what proposes to clip the spike, or to skip the step, that ended a run that was well."""
    if nan:
        return lambda values: (
            f'One bad step ended the run. Pass nonfinite="drop", and to clip only spikes max_norm = {values[0]:g}'
        )
    return lambda values: f"One bad step ended the run. To clip only spikes: max_norm = {values[0]:g}"


def one_bad_step_at(moving: bool) -> Proposal:
    """Return what proposes to skip the step with NaN that ended a run whose threshold did its work."""
    skip = 'One bad step ended the run. Pass nonfinite="drop".'
    return lambda values: f"{skip} {leave(moving)(values)}"


def leave(moving: bool) -> Proposal:
    """Return what says to change nothing."""
    if moving:
        return lambda values: f"Leave the threshold that moves as it is; its last value was {values[0]:.4g}."
    return lambda values: f"Leave max_norm at {values[0]:g}."


def on_losses(losses: Losses) -> str:
    """Say what the loss did."""
    start, best, end = (f"{number:.3g}" for number in (losses.start, losses.best, losses.end))
    return {
        "unknown": _FEW_LOSSES.format(losses.recorded) if losses.recorded else RECORD,
        "fell": f"The loss fell from {start} to {end}.",
        "rose": f"The loss rose from {start} to {end}. If this loss should fall, the steps are too long. If it should "
        "rise, as an accuracy or a reward, record its negative.",
        "rebounded": f"The loss fell from {start} to {best} at step {losses.best_until:,}, then rose to {end}.",
        "flat": f"The loss did not move by more than its noise: {start} at the start, {end} at the end. If guessing "
        "gives this loss, the learning rate is far too low or too high.",
    }[losses.kind]


def on_level(level: Level) -> str:
    """Say where the level is, whether it moved, and how widely the norms spread."""
    text = f"The median norm of the newer half is {level.middle:.3g}"
    if level.high > 2 * level.middle:
        text += f", and 10% of those norms are above {level.high:.3g}"
    if level.rise >= 1.5:
        return f"{text}. The level rose: from {level.first:.3g} at the first steps to {level.last:.3g} at the last."
    if level.rise <= 1 / 3:
        text = f"{text}. The level fell: from {level.first:.3g} at the first steps to {level.last:.3g} at the last."
        if level.guard < level.first / 2:
            return f"{text} The higher one lasted for a few steps only and is not counted."
        return (
            f"{text} A fixed threshold fits only one of them, here the higher one. A threshold that follows the norms "
            "fits both."
        )
    return f"{text}."


def on_spikes(spikes: int) -> str:
    """Say how many spikes there were."""
    if not spikes:
        return "There were no spikes."
    which = f"above {SPIKE:g} times the median of the {BEFORE} before"
    return f"There {'was 1 spike, a norm' if spikes == 1 else f'were {spikes:,} spikes, norms'} {which}."


def on_clipping(share: float, in_use: float, moving: bool) -> tuple[str, ...]:
    """Say what the threshold in use did to ordinary steps."""
    if not in_use > 0:
        return ()
    which = "The thresholds in use" if moving else f"The threshold in use, {in_use:g},"
    return (f"{which} clipped {share:.1%} of the steps that were no spikes.",)


def on_leaving(losses: Losses) -> str:
    """Say why clipping most steps may be right."""
    if losses.kind == "flat":
        return "If the loss should have fallen: a higher threshold makes steps longer, a lower one shorter."
    return (
        "Clipping ordinary steps is no fault: the threshold then sets their length, and with SGD it is part of the "
        "learning rate. A higher threshold makes steps longer, and may end the training."
    )


def before(step: int, level: Level) -> str:
    """Say that all was well until a step."""
    return f"Until step {step:,} the level was steady, with a median norm of {level.middle:.3g}. The run ended there."


def on_policy(columns: Columns) -> tuple[str, ...]:
    """Say what happened at steps that were skipped or not finite, as far as the record shows the policy."""
    finite, skipped = columns.finite, columns.skipped
    kinds = (
        (finite & skipped, "with a finite norm {} skipped: above skip_above times the threshold."),
        (~finite & skipped, "with a norm that is NaN or infinite {} skipped, as nonfinite= says."),
        (
            ~finite & ~skipped,
            "with a norm that is NaN or infinite {} not skipped. Unless the loop tests the norm, the weights become "
            'NaN: pass nonfinite="drop".',
        ),
    )
    return tuple(_steps(int(which.sum()), text) for which, text in kinds if which.any())


def tiny(step: Step) -> str:
    """Warn of a step whose gradients clipping made nearly zero."""
    return (
        f"at step {step.step:,} clipping multiplied the gradients by {step.coefficient:.1e}: their norm was "
        f"{step.norm:.3g}, max_norm {step.max_norm:.3g}. Optimizers that normalize gradients, such as Muon or Adam, "
        f"then see little but their own eps. {_ON_TINY} A monitor warns of this once."
    )


def on_tiny(columns: Columns) -> tuple[str, ...]:
    """Say how many steps had a coefficient so small that an optimizer may lose the gradients."""
    with np.errstate(all="ignore"):
        small = columns.clipped & (columns.max_norms > 0) & (columns.max_norms < TINY * columns.norms)
    count = int(small.sum())
    return (_steps(count, f"with a coefficient below {TINY:g} {{}} recorded. {_ON_TINY}"),) if count else ()


def on_missing(columns: Columns) -> tuple[str, ...]:
    """Say at how many steps the loss is known, unless it is at all of them or at too few."""
    known = np.flatnonzero(np.isfinite(columns.losses))
    if not LEAST <= len(known) < len(columns.losses):
        return ()
    last = int(columns.steps[known[-1]])
    return (f"The loss is finite at {len(known):,} of {len(columns.losses):,} steps, the last of them step {last:,}.",)


def on_record(columns: Columns) -> tuple[str, ...]:
    """Say what the record shows beside norms and losses: what is missing, policies, tiny coefficients, zeros."""
    return (*on_missing(columns), *on_tiny(columns), *on_policy(columns), *on_zeros(columns))


def on_zeros(columns: Columns) -> tuple[str, ...]:
    """Say how many steps had nothing to clip."""
    zeros = int((columns.norms == 0).sum())
    return (_steps(zeros, "with a norm of 0 {} left out here."),) if zeros else ()


def _in_order(values: tuple[float, ...]) -> str:
    return f"try max_norm = {', then '.join(f'{value:g}' for value in values)}"


def _steps(count: int, text: str) -> str:
    return f"{'1 step' if count == 1 else f'{count:,} steps'} {text.format('was' if count == 1 else 'were')}"
