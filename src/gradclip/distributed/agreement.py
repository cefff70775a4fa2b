"""Check that all processes of one call pass the same arguments, without extra communication.

Each process sends two digests of its arguments, both integers, along with the values that are reduced anyway. If all n
processes pass the same arguments, the sum of each digest is exactly n times the process's own digest. If two different
sets of arguments occur, the sum is strictly between n times one digest and n times the other, so every process notices.
With more than two, a process misses the difference with a probability below 2**-60. For orders that take the maximum
instead of a sum, the second digest is the negative of the first: both maxima equal the process's own digests only if
all are the same. If some processes sum and others take the maximum, because their orders differ, the result matches
neither, and they notice too.

Only when a difference is found do the processes exchange the arguments themselves, for the error message.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence

from gradclip.typing import Threshold
from gradclip.wording import listed

Asked = tuple[tuple[str, str], ...]
"""The name of each argument and its value as text. Empty for a process that failed to prepare its gradients."""


_SCALE = "the scale of GradScaler"
_SAME_SCALE = (
    "After an overflow each GradScaler lowers its own scale. To lower all, use "
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler with the same process group, and call its unscale_ "
    "before its step"
)


def asked(
    order: float,
    nonfinite: str,
    max_norm: Threshold | None,
    *,
    skip_above: float = math.inf,
    scale: Threshold | None = None,
) -> Asked:
    """Return the arguments of a call as text. `max_norm` is the value passed, or None if there is no threshold.

    The value of a tensor on a device is not read, because reading it would wait for the device.
    """
    return (
        ("max_norm", _shown(max_norm, "not given (grad_norm)")),
        ("ord", repr(order)),
        ("nonfinite", repr(nonfinite)),
        ("skip_above", repr(skip_above)),
        (_SCALE, _shown(scale, "not given")),
    )


def _shown(max_norm: Threshold | None, absent: str) -> str:
    if max_norm is None:
        return absent
    place = getattr(getattr(max_norm, "device", None), "type", "cpu")
    if place != "cpu":
        return f"on {place}"
    try:
        return repr(float(max_norm))
    except (TypeError, ValueError, RuntimeError):
        return f"{max_norm!r:.40}"


def marks(subject: object, processes: int, *, largest: bool) -> tuple[float, float]:
    """Return two integers that identify `subject` by its `repr`. Their sum over the processes is exact."""
    digest = hashlib.blake2b(repr(subject).encode(), digest_size=16).digest()
    limit = 1 << (52 - processes.bit_length())
    first, second = (1 + int.from_bytes(half, "big") % limit for half in (digest[:8], digest[8:]))
    return float(first), float(-first if largest else second)


def differences(of_ranks: Iterable[tuple[int, Asked, str]]) -> str:
    """Describe in words how the arguments and process groups of the ranks differ."""
    ranks = sorted(of_ranks)
    names = dict.fromkeys(name for _, asked, _ in ranks for name, _ in asked)
    found = [_values(name, [(dict(asked)[name], rank) for rank, asked, _ in ranks if asked]) for name in names]
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
