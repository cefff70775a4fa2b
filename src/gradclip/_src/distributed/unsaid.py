"""Parameters that look like a part of those of several processes, although no argument names the others."""

import warnings

from gradclip._src.backends.torch.distributed import fsdp1_shard
from gradclip._src.backends.torch.process_groups import rank
from gradclip._src.passed.groups import UNNAMED
from gradclip._src.passed.parameters import ParameterList


def check_unsaid(params: ParameterList) -> None:
    """Check for sharded or missing parameters when no argument names the processes that hold the rest.

    Raises ValueError for FSDP1 shards. Warns if one of several processes passes an empty list.
    """
    if not params.parameters and params.tree is None and not params.unmatched:
        warnings.warn(
            f"this process, rank {rank()}, passes no parameters. Its norm is 0, and processes that "
            "hold distributed tensors will wait for it. Pass the parameters even if they have no gradients, or pass "
            "process_group=. If this process is meant to be alone, pass process_group=[].",
            RuntimeWarning,
            stacklevel=4,
        )
    unsaid = [p for p, beside in zip(params.parameters, params.beside_each(), strict=True) if beside is UNNAMED]
    at = fsdp1_shard(unsaid)
    if at is not None:
        raise ValueError(
            "the parameters are shards of FullyShardedDataParallel (FSDP1), and no argument names the processes that "
            "hold the other shards. Pass process_group=model.process_group, where model is the FSDP module. With "
            "NO_SHARD every process holds everything: pass process_group=[]."
        )


def check_shows_units(params: ParameterList) -> None:
    """Raise a ValueError for shards of FSDP1: they are flat, so that rows cannot be told apart."""
    at = fsdp1_shard(params.parameters)
    if at is not None:
        raise ValueError(
            f"{params.name(at)} is a flat shard of FullyShardedDataParallel (FSDP1), which does not show its units. "
            "Use fully_shard (FSDP2), or call gradclip.clip_grad_layer_norm_ or gradclip.clip_grad_norm_."
        )
