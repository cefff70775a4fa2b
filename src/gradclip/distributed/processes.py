"""The processes that make one in-place call: usually one, else several that each hold shards of the gradients."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from gradclip.backends import Backend, among_several, any_distributed
from gradclip.core.holders import Holders
from gradclip.core.nonfinite import Nonfinite
from gradclip.core.norms import Order
from gradclip.distributed.mesh_axes import holders_of
from gradclip.parameters import UNNAMED, ParameterList, as_tuple
from gradclip.typing import Meshes, ProcessGroups, Threshold


class Processes(Protocol):
    """What a call asks of them before there are arrays to be measured."""

    def preparing(self) -> AbstractContextManager[None]:
        """Return a context in which an error ends the call on all processes."""

    def ask(self, order: Order, nonfinite: Nonfinite, max_norm: Threshold | None = None) -> None:
        """Take note of what this process asks for, which must be the same on all."""

    def nothing(self) -> Sequence[Any]:
        """Return the arrays that stand for those of a process without gradients."""

    def keep(self, indices: Sequence[int]) -> None:
        """Keep the gradients of this process at these indices, and forget the others."""

    def holders(self, backend: Backend) -> Holders:
        """Return who holds the gradients, of which this process has arrays of the backend."""


class OneProcess:
    """A process that makes the call for itself, so that there is nothing to agree on."""

    _alone = nullcontext()

    def preparing(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return self._alone

    def ask(self, order: Order, nonfinite: Nonfinite, max_norm: Threshold | None = None) -> None:
        """Do nothing."""

    def nothing(self) -> Sequence[Any]:
        """Return no arrays."""
        return ()

    def keep(self, indices: Sequence[int]) -> None:
        """Do nothing."""

    holders = staticmethod(holders_of)


ONE_PROCESS = OneProcess()


def processes_of(params: ParameterList, process_group: ProcessGroups, mesh: Meshes) -> Processes:
    """Return the processes that hold the gradients of parameters, given the groups that are named.

    Raises ValueError where the parameters are shards, and nothing says of what.
    """
    said = process_group is not None or mesh is not None
    named = (*as_tuple(process_group), *as_tuple(mesh)) if said else ()
    alone = not named and (not params.beside or all(beside is UNNAMED for beside in params.beside))
    alone = alone and not any_distributed(params.parameters) and not any_distributed(params.gradients)
    unsure = not said and among_several()
    if alone and not unsure:
        return ONE_PROCESS
    # It imports torch.distributed, which may not be there.
    from gradclip.distributed import process_groups

    if unsure:
        process_groups.check_unsaid(params)
    return ONE_PROCESS if alone else process_groups.ProcessGroups(params, named)
