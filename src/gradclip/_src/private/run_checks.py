"""What must agree before a `PrivateRun` may release a sum: batches, generator, overflow and sensitivity."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradclip._src.backends.registry import framework_of
from gradclip._src.per_example.sensitivity import Sensitivity
from gradclip._src.private.discrete import EXACT
from gradclip._src.private.noise import is_recorded
from gradclip._src.tree import flatten
from gradclip._src.words import shown, typed

if TYPE_CHECKING:
    from gradclip._src.private.batches import PoissonBatches


def check_not_recorded(summed: object) -> None:
    """Raise a ValueError for a sum inside of compiled code."""
    if is_recorded([leaf for leaf in flatten(summed).leaves if framework_of(leaf) is not None]):
        raise ValueError(
            "a run counts what it releases, and compiled code would count once for all calls. Return the sum from the "
            "compiled function, and call add_noise of the run on it, outside of compiled code."
        )


def check_batches(batches: object) -> None:
    """Raise a TypeError for anything but batches that are sampled as the accountant assumes."""
    missing = [name for name in ("n", "rate", "steps", "pad_to", "overflow", "secure") if not hasattr(batches, name)]
    if missing:
        raise TypeError(
            f"batches must be gradclip.PoissonBatches, got {typed(batches)}. The "
            "accountant holds for batches that are sampled as it assumes, not for a shuffled data set."
        )


def check_generator(rng: object) -> None:
    """Raise a TypeError for what draws no noise, or the same noise at every step."""
    if not (isinstance(rng, str) and rng in EXACT) and not hasattr(rng, "normal") and not hasattr(rng, "manual_seed"):
        raise TypeError(
            f"rng must be 'system', 'opendp', a numpy.random.Generator or a torch.Generator, got {shown(rng)}. A JAX "
            "key would give every step the same noise: call gradclip.add_noise with a new key at each step, and "
            "dp-accounting for epsilon."
        )


def check_overflow(batches: PoissonBatches, delta: float) -> None:
    """Raise a ValueError for batches that overflow too often for delta."""
    if 2 * batches.overflow >= delta:
        raise ValueError(
            f"a batch does not fit into {batches.pad_to} places with a probability of up to {batches.overflow:.2g} in "
            f"{batches.steps} steps, and delta is {delta:g}. Pass a larger pad_to, or leave it out."
        )


def check_sensitivity(sensitivity: object, pad_to: int) -> None:
    """Raise an error for a sensitivity that does not fit Poisson batches of up to `pad_to` units."""
    if not isinstance(sensitivity, Sensitivity):
        raise TypeError(
            f"sensitivity must be a gradclip.Sensitivity, got {shown(sensitivity)}: a number does not say what it "
            "compares. Call .sensitivity() of a clipped function, or gradclip.clipped_sum_sensitivity."
        )
    if sensitivity.relation not in ("add_or_remove_one", "zero_out"):
        raise ValueError(
            f"the sensitivity is for {sensitivity.relation!r}, and Poisson batches are accounted for adding or "
            "removing one, or putting zeros in its place. Pass .sensitivity('add_or_remove_one'). Its epsilon, twice, "
            "holds for replacing one, at (1 + e**epsilon) times delta."
        )
    if not sensitivity.total > 0:
        raise ValueError("the sensitivity is 0: such sums need no noise. Check max_norm.")
    if sensitivity.batch_size is None or sensitivity.batch_size < pad_to:
        held = "does not say for which batches it holds"
        held = held if sensitivity.batch_size is None else f"holds for {sensitivity.batch_size} {sensitivity.unit}s"
        raise ValueError(
            f"the sensitivity {held}, and batches have up to {pad_to}. Pass pad_to=batches.pad_to to "
            "the clipped function, or batch_size=batches.pad_to to .sensitivity()."
        )
