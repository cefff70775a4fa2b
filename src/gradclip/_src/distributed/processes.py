"""The processes that make an in-place call together: usually one, sometimes several that each hold shards."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from gradclip._src.backends import among_several, any_distributed
from gradclip._src.core.each_norm import EachNorm
from gradclip._src.core.holders import Holders
from gradclip._src.core.nonfinite import Nonfinite
from gradclip._src.core.norms import Order
from gradclip._src.core.protocols import Backend
from gradclip._src.distributed.mesh_axes import holders_of
from gradclip._src.passed.groups import UNNAMED, as_tuple
from gradclip._src.passed.parameters import ParameterList
from gradclip.typing import Meshes, Parameters, ProcessGroups, Threshold


class Processes(Protocol):
    """What a call asks of the processes before there are arrays to measure. The answers here are those of one alone."""

    def preparing(self) -> AbstractContextManager[None]:
        """Return a context in which an error ends the call on all processes."""
        return _NOTHING_TO_TELL

    def ask(
        self,
        order: Order,
        nonfinite: Nonfinite,
        max_norm: Threshold | Sequence[Threshold] | None = None,
        *,
        skip_above: float = math.inf,
        scale: Threshold | None = None,
        more: Sequence[tuple[str, Any]] = (),
    ) -> None:
        """Record this process's arguments, which must be the same on all processes; `more` are others, with names."""

    def agreeing(self) -> AbstractContextManager[None]:
        """Return `preparing` for a call that measures nothing. At its end, differing arguments raise everywhere."""
        return _NOTHING_TO_TELL

    def anywhere(self, found: bool) -> bool:
        """Return whether any process found something. All of them must ask."""
        return found

    def nothing(self) -> Sequence[Any]:
        """Return the arrays to measure for a process without gradients."""
        return ()

    def filled(self, params: ParameterList, shape: Callable[[Any], Sequence[int]]) -> ParameterList:
        """Return the parameters, with something in the place of gradients that only other processes may have."""
        return params

    def lack_gradients(self, params: ParameterList) -> None:
        """Warn that no parameter has a gradient, as soon as no process can have one."""
        params.warn_of_no_gradient()

    def check_units(self) -> None:
        """Raise a ValueError if gradients are held in a form that does not show their units."""
        return

    def watched(self, each: EachNorm | None) -> EachNorm | None:
        """Take charge of what takes the norm of each gradient, or return it to the caller, who measures the norms."""
        return each

    def holders(self, backend: Backend) -> Holders:
        """Return the holders of the gradients. This process has arrays of `backend`."""
        return holders_of(backend)


class OneProcess(Processes):
    """A process that makes the call alone, so there is nothing to agree on."""

    def ask(self, *_: object, **__: object) -> None:
        """Do nothing."""


_NOTHING_TO_TELL = nullcontext()
ONE_PROCESS = OneProcess()


@contextmanager
def telling(
    parameters: Parameters, process_group: ProcessGroups, mesh: Meshes, *, each: bool = False
) -> Iterator[None]:
    """Return a context for what precedes `preparing`: an error in it also ends the call on all processes."""
    try:
        yield
    except Exception:
        params = ParameterList.as_far_as_listed(parameters)
        if process_group is None and mesh is None and not (params.parameters or params.beside):
            raise  # nothing says whom to tell
        with processes_of(params, process_group, mesh, each=each).preparing():
            raise


def processes_of(params: ParameterList, process_group: ProcessGroups, mesh: Meshes, *, each: bool = False) -> Processes:
    """Return the processes that hold the gradients of the parameters, from the groups and meshes passed.

    `each`: the call has many norms, those of layers or units, not one.
    Raises ValueError if the parameters are shards and no argument names the other processes.
    """
    said = process_group is not None or mesh is not None
    named = (*as_tuple(process_group), *as_tuple(mesh)) if said else ()
    alone = not named and (not params.beside or all(beside is UNNAMED for beside in params.beside))
    alone = alone and not any_distributed(params.parameters) and not any_distributed(params.gradients)
    unsure = not said and among_several()
    if alone and not unsure:
        return ONE_PROCESS
    # Imported late: it imports torch.distributed, which may be missing.
    from gradclip._src.distributed import process_groups, unsaid

    if unsure:
        unsaid.check_unsaid(params)
    return ONE_PROCESS if alone else process_groups.ProcessGroups(params, named, each=each)
