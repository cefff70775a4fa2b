"""Gradients that are the same in all processes of a group that was named, and so must not be added up over it.

Data parallelism (DistributedDataParallel) leaves the same gradients everywhere. A `process_group` says that each
process holds others: the norm of n replicas comes out sqrt(n) times too large. Digests of what each process holds
travel with the norm, as in `agreement`; only where these are the same are the elements compared, by a digest of all
their bits.

Gradients of one magnitude, such as ones, signs and single numbers, may well be the same where each process holds its
own. So there must be two magnitudes, and gradients that are zero or not finite are not compared.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from gradclip.backends.arrays import Arrays
from gradclip.backends.host.arrays import widened
from gradclip.backends.torch.groups import Group
from gradclip.core.norms import Norm
from gradclip.distributed.agreement import marks
from gradclip.distributed.shardings import Shardings
from gradclip.wording import listed


class Replicas:
    """What this process holds of the gradients that are sharded over groups which were named."""

    def __init__(self, named: Sequence[Group], shardings: Shardings) -> None:
        self._named, self._shardings = set(named), shardings
        self._norms: Sequence[Norm] = ()
        self._divided: Sequence[Arrays] = ()

    def look(self, norms: Sequence[Norm], divided: Sequence[Arrays]) -> None:
        """Take note of the norm, known to the host, and the arrays of each sharding."""
        self._norms, self._divided = norms, divided

    def marks(self, group: Group, *, largest: bool) -> tuple[float, float]:
        """Return what stands for the gradients that are sharded over a group, zeros where it is not to be compared."""
        if group not in self._named or not self._norms:
            return 0.0, 0.0
        norms = [self._norms[number] for number in self._shardings.over(group)]
        lengths = [(float(norm.value), None if norm.divisor is None else float(norm.divisor)) for norm in norms]
        if not any(value for value, _ in lengths) or not all(math.isfinite(value) for value, _ in lengths):
            return 0.0, 0.0
        return marks(lengths, len(group.ranks), largest=largest)

    def digest(self, group: Group) -> bytes | None:
        """Return a digest of all elements sharded over a group, None where they do not have two magnitudes."""
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
    """Return the message of an error about replicas."""
    ranks, count = listed(group.ranks), len(group.ranks)
    return (
        "process_group or mesh names processes of which each holds other gradients, and those of the ranks "
        f"{ranks} are the same to the last bit, so that they would count {count} times. "
        "After DistributedDataParallel every process holds the whole gradient: leave process_group and mesh out. "
        "Nothing has been changed."
    )
