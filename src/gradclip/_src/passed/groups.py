"""The keys of a parameter group that say how it is clipped: its own threshold, its processes, its parameters' names."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from gradclip.typing import Parameters

UNNAMED = object()
SHARED = "shared"
"""The key of a group of parameters that another process has too, and counts; and the attribute by which Megatron marks
them."""

FOLLOWS = "AdaptiveNorm"
"""Saved as the threshold of a group that has one. `torch.distributed.checkpoint` asks for each key of the optimizer."""
_READ = frozenset(("params", "param_names", "process_group", "mesh", "max_norm", SHARED))
_SETS_CLIPPING = re.compile("clip|max_?(grad(ient)?_?)?norm|norm_type|nonfinite|skip_above|process_?group|mesh|^ord$")
"""In the keys of a parameter group: names of thresholds, orders and processes, in gradclip and in other libraries."""
_OF_OPTIMIZERS = frozenset(
    ("max_grad_norm", "clip_threshold", "clipping_threshold", "trust_clip", "clip_lambda", "clip_exp")
)
"""Settings of LAMB, Adan, Adafactor, LARS and ADOPT that clip in the optimizer's own step."""
_OF_TORCH = frozenset(("lr", "foreach", "differentiable"))
"""Settings that the optimizers of torch.optim have together. None of them clips by the settings above."""


def is_group(entry: object) -> bool:
    """Return whether an entry is a parameter group."""
    return isinstance(entry, dict) and "params" in entry


def have_thresholds(parameters: object) -> bool:
    """Return whether parameters are parameter groups of which one has a threshold of its own."""
    if not isinstance(parameters, list | tuple) or not parameters or not is_group(parameters[0]):
        return False
    return any(is_group(group) and "max_norm" in group for group in parameters)


def without_thresholds(groups: Parameters) -> list[dict[str, Any]]:
    """Return parameter groups without their thresholds; what is no group stays as it is."""
    return [
        {key: value for key, value in group.items() if key != "max_norm"} if is_group(group) else group
        for group in groups  # type: ignore[union-attr]
    ]


@lru_cache(maxsize=256)
def _sets_clipping(key: Any) -> bool:
    """Say whether a key sounds as if it set clipping, and is not read."""
    return isinstance(key, str) and key not in _READ and _SETS_CLIPPING.search(key) is not None


def check_keys(group: dict[str, Any], number: int, *, own_thresholds: bool) -> None:
    """Raise a ValueError for keys that would set clipping if they were read, among any that an optimizer may have."""
    own = _OF_OPTIMIZERS if "lr" in group and not group.keys() >= _OF_TORCH else frozenset()
    unread = [key for key in group if _sets_clipping(key) and key not in own]
    if unread:
        raise ValueError(
            f"parameters[{number}] has the keys {', '.join(map(repr, unread))}, which gradclip does not read. Leave "
            "them out, or pass model.parameters() if they are the optimizer's own. A group names its own threshold "
            "under 'max_norm', its processes under 'process_group' or 'mesh'."
        )
    if not isinstance(group.get(SHARED, False), bool):
        raise TypeError(
            f"parameters[{number}][{SHARED!r}] must be True or False, got {group[SHARED]!r}. True says that another "
            "process has the same gradients, and counts them."
        )
    if isinstance(group.get("max_norm"), str) and group["max_norm"] == FOLLOWS:
        raise ValueError(
            f"parameters[{number}]['max_norm'] is {FOLLOWS!r}: it comes from the saved state of an optimizer that "
            "clips. Set it to an AdaptiveNorm and call clip_at_step before you load the state, or delete the key."
        )
    if "max_norm" in group and not own_thresholds:
        raise ValueError(
            f"parameters[{number}] has the key 'max_norm', a threshold of its own, which this function does not read. "
            "gradclip.clip_grad_norm_ reads it, and so does gradclip.integrations.torch.clip_at_step. Call one of "
            "them, or leave the key out."
        )


def names_beside(group: dict[str, Any], size: int) -> Sequence[str | None]:
    """Return the names of the parameters of a group, if it has one for each."""
    names = group.get("param_names") or ()
    return names if len(names) == size else [None] * size


def processes_beside(group: dict[str, Any]) -> Any:
    """Return the process groups and meshes that a parameter group names; `UNNAMED` if it has neither key."""
    if "process_group" not in group and "mesh" not in group:
        return UNNAMED
    return as_tuple(group.get("process_group")) + as_tuple(group.get("mesh"))


def as_tuple(named: object) -> tuple[Any, ...]:
    """Return one or several process groups or meshes, or None, as a tuple."""
    if named is None:
        return ()
    return tuple(named) if isinstance(named, list | tuple) else (named,)
