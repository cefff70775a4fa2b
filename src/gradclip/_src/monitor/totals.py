"""How many steps a monitor has recorded, and what became of them."""

from gradclip._src.monitor.history import History
from gradclip._src.monitor.records import Counts


class Totals:
    """The numbers of steps, all of them, also those that are no longer kept."""

    _history: History

    @property
    def counts(self) -> Counts:
        """The numbers of all steps, of clipped, skipped and non-finite steps, and the share clipped."""
        return self._history.counts()

    @property
    def steps(self) -> int:
        """The number of steps recorded, including those that are no longer kept."""
        return self.counts.steps

    @property
    def clipped(self) -> int:
        """The number of steps that were clipped."""
        return self.counts.clipped

    @property
    def skipped(self) -> int:
        """The number of steps that were skipped."""
        return self.counts.skipped

    @property
    def nonfinite(self) -> int:
        """The number of steps with a non-finite norm."""
        return self.counts.nonfinite
