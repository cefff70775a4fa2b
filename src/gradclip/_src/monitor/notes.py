"""What is easily overlooked or misread, in words that fit the policy of the clipping calls."""

from gradclip._src.core.nonfinite import Nonfinite
from gradclip._src.monitor.advice.advice import Advice
from gradclip._src.monitor.records import Columns, Overview


def notes(shown: Overview) -> list[str]:
    """Return notes on what is easily overlooked or misread."""
    counts, columns = shown.counts, shown.columns
    ordinary = columns.clipped[columns.finite & ~columns.skipped]
    found = []
    if ordinary.size and ordinary.all():
        found.append(
            "100% of the steps that were neither skipped nor NaN were clipped: the threshold set the length of every "
            "gradient. The advice below says what to make of it."
        )
    if counts.steps > counts.nonfinite and not counts.clipped:
        above = "" if not counts.skipped else ", except at skipped steps"
        found.append(f"Nothing was clipped: the norm was never above the threshold{above}.")
    if counts.nonfinite:
        found.append(_about_nonfinite(shown))
    if len(columns.steps) < counts.steps:
        found.append(
            f"Pictures and percentiles show the last {len(columns.steps):,} of {counts.steps:,} steps. The counts "
            "cover all steps. To keep more, use a Monitor with a larger capacity."
        )
    return found


def _about_nonfinite(shown: Overview) -> str:
    """Say at how many steps the norm was not finite, and what that did to the gradients as far as steps are kept."""
    counts, columns = shown.counts, shown.columns
    spoiled = int((~columns.finite & ~columns.skipped).sum())
    skipped = int((~columns.finite & columns.skipped).sum())
    number = f"At {counts.nonfinite:,} of {counts.steps:,} steps the norm was NaN or infinite."
    if not spoiled and counts.skipped:
        if skipped == counts.nonfinite == 1:
            return f"{number} That step was skipped: its gradients became zeros."
        known = "They" if skipped == counts.nonfinite else "Those that are kept"
        return f"{number} {known} were skipped: their gradients became zeros." if skipped else number
    which = f" {spoiled:,} of those kept were not skipped." if skipped else ""
    if shown.handling is not None and not Nonfinite.named(shown.handling.nonfinite).spoils:
        return f'{number}{which} The last calls had nonfinite="{shown.handling.nonfinite}".'
    return (
        f'{number}{which} With nonfinite="propagate" such a step fills the gradients with NaN; "skip" and "zero" '
        "prevent that."
    )


def about_proposal(shown: Overview, advice: Advice) -> list[str]:
    """Return what the policy of the calls means for a proposed threshold."""
    columns, handling, proposed = shown.columns, shown.handling, advice.max_norm
    found = []
    if moves(columns) and advice.state != "leave":
        found.append(
            "The threshold in use moved from step to step. The proposal is a fixed threshold to compare it with."
        )
    if handling is None:
        return found
    if proposed is not None and handling.skips_spikes:
        found.append(
            f"Steps above {handling.skip_above:g} times the threshold were skipped, not clipped. With the proposal and "
            f"the same skip_above, norms above {handling.skip_above * proposed:.4g} would be skipped."
        )
    if Nonfinite.named(handling.nonfinite).zeroes:
        found.append(
            f'nonfinite="{handling.nonfinite}" was on: a norm covers the finite elements only. A step with NaN looks '
            "ordinary here."
        )
    return found


def moves(columns: Columns) -> bool:
    """Whether the threshold changed between the kept steps."""
    return bool(len(columns.max_norms)) and bool((columns.max_norms != columns.max_norms[0]).any())
