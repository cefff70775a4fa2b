"""The mistakes that a guard finds and how to mend each, found from what happened before a step and the norm it gets."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradclip._src.annotations import Scalar
from gradclip._src.guard.window import GradientOperation
from gradclip._src.step.heard import ClipCall, threshold_of

FIXES = {
    "after_step": "Clip between loss.backward() and optimizer.step().",
    "before_backward": "Clip after loss.backward() and before optimizer.step().",
    "other_parameters": (
        "Pass all parameters of the optimizer: "
        "[p for group in optimizer.param_groups for p in group['params']], or make one call for each part."
    ),
    "still_scaled": "Call scaler.unscale_(optimizer) after the last backward() and before you clip.",
    "ranks_disagree": (
        "Average the gradients over the processes before you clip: wrap the model in DistributedDataParallel, and "
        "leave no_sync() before the last backward(). If the processes hold different parameters, pass replicas=False."
    ),
    "used_up": "Pass model.parameters() itself at every call, or keep list(model.parameters()).",
    "clipped_twice": (
        "Clip once for each step, after the last backward() of the accumulation, and divide each loss by the number of "
        "micro-batches."
    ),
    "tiny_coefficient": (
        "Look for what made the norm so large, or raise max_norm. Clip parameters of Muon, and others whose update "
        "does not depend on the length of the gradient, on their own or not at all."
    ),
    "skipped": (
        "Look for NaN or infinity in the batch and the loss, and lower the learning rate if they go on. "
        "gradclip.Monitor names the layers."
    ),
    "not_clipped": (
        "Clip to max_norm between loss.backward() and optimizer.step(), or pass the guard the threshold that you use."
    ),
    "nonfinite": (
        "Skip such a step: test norm.isfinite() before optimizer.step(), or call gradclip.clip_at_step with "
        "nonfinite='skip'."
    ),
}
"""What to do about each kind of mistake."""


@dataclass(frozen=True)
class Finding:
    """A mistake that a guard has found.

    Attributes:
        step: the number of the step, counted from 1 since `gradclip.guard` was called.
        kind: "after_step", "before_backward", "other_parameters", "still_scaled", "ranks_disagree", "used_up",
            "clipped_twice", "tiny_coefficient", "skipped", "not_clipped" or "nonfinite".
        sentence: what was seen.
        fix: what to do.

    """

    step: int
    kind: str
    sentence: str
    fix: str

    @classmethod
    def of(cls, step: int, kind: str, sentence: str) -> "Finding":
        """Return a finding with the fix for its kind."""
        return cls(step, kind, sentence, FIXES[kind])

    def __str__(self) -> str:
        return f"step {self.step}: {self.sentence} {self.fix}"


TINY = 1e-6
"""Coefficients below it starve optimizers whose update does not depend on the length of the gradient."""

Found = tuple[str, str]
"""A kind of mistake, and what was seen."""


def _nothing(_parameters: Sequence[Any]) -> float:
    return 0.0


@dataclass(frozen=True)
class Facts:
    """What is known at a step.

    Attributes:
        norm: the norm that the optimizer gets.
        max_norm: the threshold that it should not exceed; inf if there is none.
        slack: by how much it may, relatively: other libraries round.
        happened: what happened since the step before.
        after_step: whether there was one.
        parameters: those of the optimizer that have a gradient.
        order: the order of the norm.
        scale: by how much a GradScaler has scaled the loss.
        closure: whether the step got a closure that computes the gradients.
        known: the norm before clipping and its threshold, if a handle clips within the step.
        norm_of: measures the gradients of some parameters.
        by_parts: whether each gradient or each element keeps to `max_norm`, and one reaches it.

    """

    norm: float
    max_norm: float
    happened: Sequence[GradientOperation] = ()
    after_step: bool = True
    parameters: Sequence[Any] = ()
    slack: float = 1e-3
    order: float = 2.0
    scale: float = 1.0
    closure: bool = False
    known: tuple[float, float] | None = None
    norm_of: Callable[[Sequence[Any]], float] = _nothing
    by_parts: Callable[[], bool] = field(default=lambda: False)

    @property
    def above(self) -> bool:
        """Whether the norm is above the threshold."""
        return self.norm > self.max_norm * (1.0 + self.slack)


def judged(facts: Facts) -> Iterator[Found]:
    """Yield the mistakes. One that explains others comes alone."""
    story = _Story.of(facts)
    if not math.isfinite(facts.norm):
        yield "nonfinite", f"the optimizer got gradients of norm {facts.norm}, so its parameters become NaN."
        return
    found = story.misplaced() or story.missed() or story.scaled() or story.starved() or story.unclipped()
    if found is not None:
        yield found


def _is(norm: float, expected: float, within: float) -> bool:
    return 0 < expected < math.inf and abs(norm / expected - 1.0) <= within


@dataclass(frozen=True)
class _Story:
    """What happened, sorted: calls that clip this optimizer's gradients, and where they stand.

    `proper` are those after the last backward pass, `early` those with the place before it.
    """

    facts: Facts
    proper: list[ClipCall]
    early: list[tuple[int, ClipCall]]
    others: list[ClipCall]
    empty: list[ClipCall]
    last: int
    in_backward: bool

    @classmethod
    def of(cls, facts: Facts) -> "_Story":
        mine = set(map(id, facts.parameters))
        happened = facts.happened
        backward = [at for at, step in enumerate(happened) if step.kind == "backward"]
        last = backward[-1] if backward else -1
        calls = [(at, step.call) for at, step in enumerate(happened) if step.call is not None]
        empty = [call for _, call in calls if call.parameters is not None and not call.count]
        calls = [(at, call) for at, call in calls if _clips(call) and call not in empty]
        own = [
            (at, call)
            for at, call in calls
            if call.parameters is None or any(id(one) in mine for one in call.parameters)
        ]
        others = [call for at, call in calls if at > last and call not in [one for _, one in own]]
        inside = any(call.in_backward for _, call in own)
        own = [(at, call) for at, call in own if not call.in_backward]
        proper = [call for at, call in own if at > last]
        return cls(facts, proper, [one for one in own if one[0] < last], others, empty, last, inside)

    # Each returns what it finds, or None

    def misplaced(self) -> Found | None:
        """Clipped at the wrong time."""
        if (found := self._between_passes()) is not None:
            return found
        if self.proper or self.in_backward or self.facts.known:
            return None
        for at, call in self.early:
            if not self._backward_before(at):
                return self._before_or_late(call)
        scaled = [at for at, step in enumerate(self.facts.happened) if step.kind == "scaled" and at < self.last]
        if self.facts.after_step and self.facts.above and any(not self._backward_before(at) for at in scaled):
            return "after_step", self._late("something scaled the gradients after")
        return None

    def _before_or_late(self, call: ClipCall) -> Found:
        what = f"a call of {call.function} came"
        if self.facts.closure:
            why = "which the closure calls that step() gets: clip within the closure"
        elif not saw(call):
            why = "and found no gradients"
        elif not self.facts.after_step:
            why = "which then added to the gradients"
        else:
            return "after_step", self._late(f"{what} after")
        return "before_backward", f"{what} before backward(), {why}."

    def _late(self, what: str) -> str:
        facts = self.facts
        end = f" This step got the norm {facts.norm:.4g}, above {facts.max_norm:.4g}." if facts.above else ""
        return f"{what} the step that used the gradients, and nothing clipped them before the next step.{end}"

    def _between_passes(self) -> Found | None:
        times = sum(self._accumulated_on(at) and saw(call) for at, call in self.early)
        if times:
            whole = f"{times + 1} times" if self.proper else "before the last micro-batch was added"
            return (
                "clipped_twice",
                f"gradients that accumulate over several backward passes were clipped {whole} within one step, so the "
                "micro-batches do not count equally.",
            )
        for at, step in enumerate(self.facts.happened):
            clipped = step.kind == "scaled" and _is(step.whole, self.facts.max_norm, 10 * self.facts.slack)
            if clipped and not self.in_backward and self._accumulated_on(at):
                return (
                    "clipped_twice",
                    f"between two backward passes of one step, the gradients were scaled to the norm {step.whole:.4g}, "
                    "so the micro-batches do not count equally.",
                )
        return None

    def _backward_before(self, at: int) -> bool:
        return any(step.kind == "backward" for step in self.facts.happened[:at])

    def _accumulated_on(self, at: int) -> bool:
        """Say whether a backward pass has added to the gradients of another, with this between both."""
        following = next((step for step in self.facts.happened[at:] if step.kind == "backward"), None)
        return self._backward_before(at) and following is not None and not following.fresh

    def missed(self) -> Found | None:
        """Clipped nothing, or not all."""
        if self.in_backward or self.facts.known:
            return None
        if self.empty and not self.proper:
            return "used_up", (
                f"a call of {self.empty[-1].function} got no parameters, so it clipped nothing: a generator such as "
                "model.parameters() can be used once."
            )
        if self.facts.max_norm == math.inf:
            return None
        if not self.proper:
            if not (self.others and self.facts.above):
                return None
            call, got = self.others[-1], f"{self.facts.norm:.4g}, above {self.facts.max_norm:.4g}"
            return "other_parameters", (
                f"a call of {call.function} got {call.count} parameters, and none of them is the "
                f"optimizer's, which got the norm {got}."
            )
        if any(call.parameters is None for call in self.proper):
            return None
        covered = {id(one) for call in self.proper for one in call.parameters or ()}
        missing = [one for one in self.facts.parameters if id(one) not in covered]
        norm = self.facts.norm_of(missing) if missing else 0.0
        if not norm:
            return None
        return "other_parameters", (
            f"the call of {self.proper[-1].function} did not get {len(missing)} of the {len(self.facts.parameters)} "
            f"parameters of the optimizer that have gradients: these have the norm {norm:.4g}."
        )

    def scaled(self) -> Found | None:
        """Clipped while the gradients were those of a scaled loss."""
        facts, scale = self.facts, self.facts.scale
        if scale < 2 or facts.known:
            return None
        bounded = [call for call in self.proper if call.norm is not None and not call.several]
        calls = [call for call in bounded if threshold_of(call) <= 1.01 * facts.max_norm]
        for call in calls:
            left = min(threshold_of(call), number(call.norm))
            if _is(facts.norm * scale, left, 0.02):
                return "still_scaled", (
                    f"the call of {call.function} clipped gradients that were still multiplied by the scale {scale:g}, "
                    f"so the optimizer got the norm {facts.norm:.4g}."
                )
        if not self.proper and _is(facts.norm * scale, facts.max_norm, 1e-3):
            return "still_scaled", (
                f"the optimizer got the norm {facts.norm:.4g}, which is max_norm {facts.max_norm:.4g} divided by the "
                f"scale {scale:g}: the gradients were clipped while they were still scaled."
            )
        return None

    def starved(self) -> Found | None:
        """Clipped by a coefficient close to 0."""
        bounded = [call for call in self.proper if call.norm is not None and not call.several]
        pairs = [(number(call.norm), threshold_of(call)) for call in bounded]
        pairs += [self.facts.known] if self.facts.known else []
        smallest = min((c / norm for norm, c in pairs if c > 0 and 0 < norm < math.inf), default=1.0)
        if not pairs and self.facts.happened and self.facts.happened[-1].kind == "scaled":
            smallest = self.facts.happened[-1].ratio * self.facts.scale
        if smallest >= TINY:
            return None
        return "tiny_coefficient", f"the gradients were multiplied by {smallest:.2g} to clip them."

    def unclipped(self) -> Found | None:
        """The norm is above the threshold for none of these reasons."""
        facts = self.facts
        if not facts.above or any(call.several for call in self.proper):
            return None
        got = f"the optimizer got gradients of norm {facts.norm:.4g}, above {facts.max_norm:.4g}"
        if self.proper:
            largest = max(map(threshold_of, self.proper))
            if largest > facts.max_norm * (1.0 + facts.slack):
                return "not_clipped", f"{got}: {self.proper[-1].function} was called with the threshold {largest:.4g}."
            other = any(call.norm is None or call.order not in (None, facts.order) for call in self.proper)
            other = other or facts.norm <= self._together() * (1.0 + facts.slack)
            return None if other else ("not_clipped", f"{got}, although {self.proper[-1].function} was called.")
        if self.in_backward or not facts.after_step or facts.by_parts():
            return None
        if any(step.kind == "partly" for step in facts.happened[self.last :]):
            return "other_parameters", f"{got}: only some of the gradients were scaled before this step."
        return "not_clipped", f"{got}: nothing clipped them between backward() and this step."

    def _together(self) -> float:
        """Return the bound that calls for parts of the parameters have together."""
        each = [threshold_of(call) for call in self.proper]
        return (
            max(each)
            if math.isinf(self.facts.order)
            else math.fsum(c**self.facts.order for c in each) ** (1.0 / self.facts.order)
        )


def _clips(call: ClipCall) -> bool:
    return call.several or threshold_of(call) != math.inf


def saw(call: ClipCall) -> bool:
    """Say whether a call found gradients other than 0."""
    return call.filled > 0 and (call.norm is None or number(call.norm) != 0)


def number(norm: Scalar) -> float:
    """Return a norm as a number. This may wait for the device."""
    return float(norm)
