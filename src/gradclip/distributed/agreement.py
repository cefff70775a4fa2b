"""What the processes of one call have to ask for alike, and how they notice where they do not.

Each process sends two digests of what it asks for, integers, with what is reduced anyway. Where all n processes ask for
the same, the sum of each is n times one's own, exactly. Where two things are asked for, the sum lies strictly between
n times the one and n times the other, so that every process sees it; where there are more, one process would miss it
with a chance of less than 2**-60. For orders whose vectors are not added the second digest is the negative of the
first, and the largest of both are one's own only where all are the same. Vectors that are added by some and compared
by others, since their orders differ, give neither.

Who asked for what is exchanged only then, for the error.
"""

import hashlib
from collections.abc import Iterable, Sequence

from gradclip.typing import Threshold
from gradclip.wording import listed

Asked = tuple[tuple[str, str], ...]
"""The name of each argument, and its value as text; nothing for a process that could not prepare its gradients."""


def asked(order: float, nonfinite: str, max_norm: Threshold | None) -> Asked:
    """Return the arguments of a call as text; `max_norm` is what was passed, None where there is no threshold.

    The value of a tensor on a device stays unknown: a look at it would wait.
    """
    return ("max_norm", _shown(max_norm)), ("ord", repr(order)), ("nonfinite", repr(nonfinite))


def _shown(max_norm: Threshold | None) -> str:
    if max_norm is None:
        return "not given (grad_norm)"
    place = getattr(getattr(max_norm, "device", None), "type", "cpu")
    if place != "cpu":
        return f"on {place}"
    try:
        return repr(float(max_norm))
    except (TypeError, ValueError, RuntimeError):
        return f"{max_norm!r:.40}"


def marks(subject: object, processes: int, *, largest: bool) -> tuple[float, float]:
    """Return two integers, of which sums over so many processes are exact, that stand for something with a `repr`."""
    digest = hashlib.blake2b(repr(subject).encode(), digest_size=16).digest()
    limit = 1 << (52 - processes.bit_length())
    first, second = (1 + int.from_bytes(half, "big") % limit for half in (digest[:8], digest[8:]))
    return float(first), float(-first if largest else second)


def differences(of_ranks: Iterable[tuple[int, Asked, str]]) -> str:
    """Return in words what the ranks, each with what it asks for and the groups it names, do not have in common."""
    ranks = sorted(of_ranks)
    names = dict.fromkeys(name for _, asked, _ in ranks for name, _ in asked)
    found = [_values(name, [(dict(asked)[name], rank) for rank, asked, _ in ranks if asked]) for name in names]
    differing = [one for one in found if one]
    if differing:
        return "; ".join(differing)
    layouts = [f"rank {rank} {groups}" for rank, _, groups in ranks]
    return "the process groups over which gradients are split, or their order: " + listed(layouts, "; ")


def _values(name: str, given: Sequence[tuple[str, int]]) -> str:
    """Return who gives which value, nothing where all give the same."""
    of_value: dict[str, list[int]] = {}
    for value, rank in given:
        of_value.setdefault(value, []).append(rank)
    if len(of_value) < 2:
        return ""
    return f"{name} is " + listed([f"{value} on {_on(ranks)}" for value, ranks in of_value.items()])


def _on(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"
