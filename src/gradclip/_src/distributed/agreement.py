"""Check that all processes of one call pass the same arguments and different gradients, without extra communication.

Each process sends two digests of its arguments, both integers, along with the values that are reduced anyway. If all n
processes pass the same arguments, the sum of each digest is exactly n times the process's own digest. If two different
sets of arguments occur, the sum is strictly between n times one digest and n times the other, so every process notices.
With more than two, a process misses the difference with a probability below 2**-60. For orders that take the maximum
instead of a sum, the second digest is the negative of the first: both maxima equal the process's own digests only if
all are the same. If some processes sum and others take the maximum, because their orders differ, the result matches
neither, and they notice too.

Only when a difference is found do the processes exchange the arguments themselves, for the error message.

After data parallelism (DistributedDataParallel) every process holds the same gradients. `process_group` says the
opposite: that each process holds different ones. Used together, the norm of n replicas comes out sqrt(n) times too
large. To notice this, digests of each process's norms travel with the reduction too. Only if these match are the
elements compared, by a digest of all their bits.

Gradients with a single magnitude, such as all ones, signs or single numbers, can be equal by coincidence. So replicas
are reported only if two different magnitudes occur. Gradients that are zero or non-finite are not compared.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import numpy as np

from gradclip._src.annotations import Threshold
from gradclip._src.backends.host.arrays import widened
from gradclip._src.backends.torch.process_groups import Group
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.norms import Norm
from gradclip._src.distributed.sent import raise_failed
from gradclip._src.distributed.shardings import Shardings
from gradclip._src.words import listed

Asked = tuple[tuple[str, str], ...]
"""The name of each argument and its value as text. Empty for a process that failed to prepare its gradients."""

_FEW = 8
_SCALE = "the scale of GradScaler"
_SAME_SCALE = (
    "Start with the same scale. If the GradScaler also steps optimizers that do not clip over these processes, their "
    "overflows lower it on one alone. To lower all, use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler "
    "with the same process group, and call its unscale_ before its step"
)


def asked(
    order: float,
    nonfinite: str,
    max_norm: Threshold | Sequence[Threshold] | None,
    *,
    skip_above: float = math.inf,
    scale: Threshold | None = None,
    more: Sequence[tuple[str, Any]] = (),
) -> Asked:
    """Return the arguments of a call as text. `max_norm` is the value passed, or those of parts.

    `more` are arguments that only some calls have, as texts or thresholds.

    The value of a tensor on a device is not read, because reading it would wait for the device.
    """
    return (
        ("max_norm", shown(max_norm, "not given (grad_norm)")),
        ("ord", repr(order)),
        ("nonfinite", repr(nonfinite)),
        ("skip_above", repr(skip_above)),
        (_SCALE, shown(scale, "not given")),
        *((name, value if isinstance(value, str) else shown(value)) for name, value in more),
    )


def shown(max_norm: Any, absent: str = "None") -> str:
    """Return a threshold, or a list of them, as text that differs if the values do. `absent` stands for None."""
    if max_norm is None:
        return absent
    if isinstance(max_norm, list | tuple):
        every = [shown(one) for one in max_norm]
        digest = hashlib.blake2b(repr(every).encode(), digest_size=4).hexdigest()
        some = every if len(every) <= _FEW else [*every[:_FEW], f"... ({len(every)} in all, checksum {digest})"]
        return f"[{', '.join(some)}]"
    place = getattr(getattr(max_norm, "device", None), "type", "cpu")
    if place != "cpu":
        return f"on {place}"
    try:
        return repr(float(max_norm))
    except (TypeError, ValueError, RuntimeError):
        return repr(max_norm)


def marks(subject: object, processes: int, *, largest: bool) -> tuple[float, float]:
    """Return two integers that identify `subject` by its `repr`. Their sum over the processes is exact."""
    digest = hashlib.blake2b(repr(subject).encode(), digest_size=16).digest()
    limit = 1 << (52 - processes.bit_length())
    first, second = (1 + int.from_bytes(half, "big") % limit for half in (digest[:8], digest[8:]))
    return float(first), float(-first if largest else second)


def raise_problem(told: Sequence[tuple[int, Asked, str, str]]) -> NoReturn:
    """Raise what went wrong: an error on another process, or arguments that differ.

    `told` has each process's rank, arguments, process groups and error message; it is empty if they are not known.
    """
    problems = [f"rank {rank}: {problem}" for rank, _, _, problem in told if problem]
    if problems:
        raise_failed(problems)
    where = differences(one[:3] for one in told) if told else "max_norm, ord, nonfinite or process groups differ"
    raise ValueError(
        f"the processes passed different arguments: {where}. Pass the same arguments and process groups in every "
        "process. Nothing has been changed."
    )


def differences(of_ranks: Iterable[tuple[int, Asked, str]]) -> str:
    """Describe in words how the arguments and process groups of the ranks differ."""
    ranks = sorted(of_ranks)
    names = dict.fromkeys(name for _, asked, _ in ranks for name, _ in asked)
    passed = [(rank, dict(asked)) for rank, asked, _ in ranks if asked]
    found = [_values(name, [(given.get(name, "not given"), rank) for rank, given in passed]) for name in names]
    differing = [one for one in found if one]
    if differing:
        return "; ".join(differing)
    layouts = [f"rank {rank} {groups}" for rank, _, groups in ranks]
    return "the process groups over which gradients are split, or their order, differ: " + listed(layouts, "; ")


def _values(name: str, given: Sequence[tuple[str, int]]) -> str:
    """Say which ranks pass which value, or return an empty string if all pass the same."""
    of_value: dict[str, list[int]] = {}
    for value, rank in given:
        of_value.setdefault(value, []).append(rank)
    if len(of_value) < 2:
        return ""
    told = f"{name} is " + listed([f"{value} on {_on(ranks)}" for value, ranks in of_value.items()])
    return f"{told}. {_SAME_SCALE}" if name == _SCALE else told


def _on(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"


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


def replicas_explained(group: Group) -> str:
    """Return the error message about replicas."""
    ranks, count = listed(group.ranks), len(group.ranks)
    return (
        f"process_group or mesh says that every process holds different gradients, but those of the ranks {ranks} are "
        f"the same to the last bit, so each would count {count} times. After DistributedDataParallel every process "
        "holds the whole gradient: leave out process_group and mesh. Nothing has been changed."
    )
