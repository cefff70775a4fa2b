"""The mistakes that a guard finds, and how to mend each."""

from dataclasses import dataclass

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
        "Skip such a step: test norm.isfinite() before optimizer.step(), or call gradclip.integrations.torch.fold_into "
        "with nonfinite='skip'."
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
