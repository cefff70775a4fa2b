"""Detect identical gradients on all processes of a named group, which must not be added up over the group.

After data parallelism (DistributedDataParallel) every process holds the same gradients. `process_group` says the
opposite: that each process holds different ones. Used together, the norm of n replicas comes out sqrt(n) times too
large. To notice this, digests of each process's norms travel with the reduction, as in `agreement`. Only if these match
are the elements compared, by a digest of all their bits.

Gradients with a single magnitude, such as all ones, signs or single numbers, can be equal by coincidence. So replicas
are reported only if two different magnitudes occur. Gradients that are zero or non-finite are not compared.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from gradclip.backends.host.arrays import widened
from gradclip.backends.torch.groups import Group
from gradclip.core.arrays import Arrays
from gradclip.core.norms import Norm
from gradclip.distributed.agreement import marks
from gradclip.distributed.shardings import Shardings
from gradclip.wording import listed


class Replicas:
    """This process's gradients that are sharded over named groups."""

    def __init__(self, named: Sequence[Group], shardings: Shardings) -> None:
        self._named, self._shardings = set(named), shardings
        self._norms: Sequence[Norm] = ()
        self._divided: Sequence[Arrays] = ()

    def look(self, norms: Sequence[Norm], divided: Sequence[Arrays]) -> None:
        """Store the norm (known to the host) and the arrays of each sharding."""
        self._norms, self._divided = norms, divided

    def marks(self, group: Group, *, largest: bool) -> tuple[float, float]:
        """Return digests for the gradients sharded over a group, or zeros if they are not to be compared."""
        if group not in self._named or not self._norms:
            return 0.0, 0.0
        norms = [self._norms[number] for number in self._shardings.over(group)]
        lengths = [(float(norm.value), None if norm.divisor is None else float(norm.divisor)) for norm in norms]
        if not any(value for value, _ in lengths) or not all(math.isfinite(value) for value, _ in lengths):
            return 0.0, 0.0
        return marks(lengths, len(group.ranks), largest=largest)

    def digest(self, group: Group) -> bytes | None:
        """Return a digest of all elements sharded over a group, or None if all non-zero magnitudes are the same."""
        found, smallest, largest = hashlib.blake2b(), math.inf, 0.0
        for number in self._shardings.over(group):
            for x in self._divided[number]:
                found.update(f"{x.dtype} {x.shape}".encode() + np.ascontiguousarray(x.data).tobytes())
                magnitudes = np.abs(widened(x.data, x.dtype))
                magnitudes = magnitudes[magnitudes > 0]
                if magnitudes.size:
                    smallest, largest = min(smallest, magnitudes.min()), max(largest, magnitudes.max())
        return found.digest() if smallest < largest else None


def explained(group: Group) -> str:
    """Return the error message about replicas."""
    ranks, count = listed(group.ranks), len(group.ranks)
    return (
        f"process_group or mesh says that every process holds different gradients, but those of the ranks {ranks} are "
        f"the same to the last bit, so each would count {count} times. After DistributedDataParallel every process "
        "holds the whole gradient: leave out process_group and mesh. Nothing has been changed."
    )
