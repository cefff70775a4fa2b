"""The parameters that an in-place call chooses. Errors also reach the other processes, if any are named."""

from gradclip.choice import Choice
from gradclip.distributed.processes import telling
from gradclip.parameter_choice import chosen
from gradclip.parameter_groups import as_tuple, have_thresholds
from gradclip.parameters import ParameterList
from gradclip.typing import Integers, Meshes, Parameters, ProcessGroups, Where


def checked_choice(
    arguments: tuple[Where, Integers], parameters: Parameters, process_group: ProcessGroups, mesh: Meshes
) -> Choice:
    """Return the choice that `where` and `integers` make. Raises TypeError and ValueError."""
    with telling(parameters, process_group, mesh, each=have_thresholds(parameters)):
        return Choice(*arguments)


def chosen_parameters(
    parameters: Parameters, choice: Choice, process_group: ProcessGroups, mesh: Meshes, *, each: bool = False
) -> ParameterList:
    """List the parameters that count.

    `each`: the call measures several norms; so it does if their groups have thresholds.
    """
    with telling(parameters, process_group, mesh, each=each or have_thresholds(parameters)):
        params = ParameterList.of(parameters, own_thresholds=True)
        return chosen(params, choice, alone=not (as_tuple(process_group) or as_tuple(mesh)))
