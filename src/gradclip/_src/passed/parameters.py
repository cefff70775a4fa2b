"""The parameters of an in-place call, as a flat list, and what their groups say of thresholds, processes and names."""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from gradclip._src.annotations import Parameters
from gradclip._src.backends import Shards, any_distributed, shards_of
from gradclip._src.backends.registry import being_compiled, entry_of, known, lies_itself, load
from gradclip._src.passed.leaves import EVERY, Choice
from gradclip._src.tree import flatten
from gradclip._src.words import level_of_caller

UNNAMED = object()
SHARED = "shared"
"""The key of a group of parameters that another process has too, and counts; and the attribute by which Megatron marks
them."""

FOLLOWS = "AdaptiveThreshold"
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
            "clips. Set it to an AdaptiveThreshold and call clip_at_step before you load the state, or delete the key."
        )
    if "max_norm" in group and not own_thresholds:
        raise ValueError(
            f"parameters[{number}] has the key 'max_norm', a threshold of its own, which this function does not read. "
            "gradclip.clip_grad_norm_ reads it, and so do clip_grad_layer_norm_, clip_grad_unit_norm_ and "
            "gradclip.clip_at_step. Call one of them, or leave the key out."
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


_NO_GRADIENT = "no parameter"


@contextmanager
def may_lack_gradients(parameters: Iterable[Any]) -> Iterator[None]:
    """Return a context in which nothing warns that no process has a gradient, if this one has none."""
    if any(parameter.grad is not None for parameter in parameters):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _NO_GRADIENT, UserWarning)
        yield


@dataclass(frozen=True)
class ParameterList:
    """Parameters, the sizes of their parameter groups, and the process groups `beside` each parameter group.

    If the gradients themselves were passed, `tree` holds them: a tree of NumPy arrays. `groups` are the parameter
    groups as they were passed. The parameters are those that count, by the `choice` if the call is `choosing`;
    `left` are others that have a gradient, by their id. If the choice chooses none, `unmatched` says so.
    """

    parameters: Sequence[Any]
    sizes: Sequence[int] = ()
    beside: Sequence[Any] = ()
    tree: Any = None
    names: Sequence[str | None] = ()
    groups: Sequence[Mapping[str, Any]] = ()
    choosing: Choice | None = None  # not `EVERY` as the default: PyTorch cannot compile that
    left: dict[int, Any] = field(default_factory=dict)
    unmatched: str = ""
    _gradients: Any = field(init=False, repr=False, default=None)
    _summed: bool = field(init=False, repr=False, default=False)

    @classmethod
    def of(cls, parameters: Parameters, *, own_thresholds: bool = False) -> "ParameterList":
        """List the parameters a user passes: one, an iterable, an optimizer's parameter groups, or a tree.

        Parameters may have names, as pairs or in a dict. A parameter group is a dict with its parameters under
        "params"; of its other keys only "param_names", "process_group", "mesh", "shared" and, if the call reads
        `own_thresholds`, "max_norm" are read. Others that look like settings of clipping are refused. Raises TypeError
        and ValueError as `as_list` does.
        """
        if isinstance(parameters, list | tuple) and parameters and hasattr(parameters[0], "grad"):
            return cls(parameters)
        if not _are_groups(parameters) and _is_array_tree(
            without_thresholds(parameters) if have_thresholds(parameters) else parameters
        ):
            return cls((), tree=parameters)
        listed, names = _with_names(parameters)
        if not (listed and isinstance(listed[0], dict) and all(map(is_group, listed))):
            return cls(listed, names=names)
        for number, group in enumerate(listed):
            check_keys(group, number, own_thresholds=own_thresholds)
        groups = [_with_names(group["params"]) for group in listed]
        sizes = [len(params) for params, _ in groups]
        named = [
            names or names_beside(group, size) for (_, names), group, size in zip(groups, listed, sizes, strict=True)
        ]
        params = list(chain.from_iterable(params for params, _ in groups))
        return cls(params, sizes, list(map(processes_beside, listed)), None, list(chain.from_iterable(named)), listed)

    @classmethod
    def as_far_as_listed(cls, parameters: Parameters) -> "ParameterList":
        """List what can be listed of parameters that `of` may refuse. Their processes must hear of the error."""
        try:
            return cls.of(parameters, own_thresholds=True)
        except Exception:
            entries = parameters if isinstance(parameters, list | tuple) else ()
            groups = [group for group in entries if is_group(group)]
            listed = list(map(_listed_of, groups))
            return cls(list(chain.from_iterable(listed)), list(map(len, listed)), list(map(processes_beside, groups)))

    @property
    def choice(self) -> Choice:
        """Which leaves of a tree count, and whether integers are an error."""
        return EVERY if self.choosing is None else self.choosing

    @property
    def shared(self) -> set[int]:
        """The ids of the parameters whose gradients other processes have and count."""
        marks = [SHARED in group and group[SHARED] for group in self.groups]
        of_each = chain.from_iterable([mark] * size for mark, size in zip(marks, self.sizes, strict=True))
        marked = of_each if self.groups else [False] * len(self.parameters)
        every = zip(self.parameters, marked, strict=True)
        return {id(one) for one, mark in every if mark or getattr(one, SHARED, False) is True}

    @property
    def flat(self) -> Sequence[Any] | None:
        """The parameters, if they alone are what was passed; None for a tree, or if a group names processes."""
        named = self.tree is not None or any(one is not UNNAMED for one in self.beside)
        return None if named else self.parameters

    @property
    def gradients(self) -> list[Any]:
        """The `.grad` of each parameter, read once; None for a parameter without this attribute."""
        # Not a `cached_property`: compiled code cannot take its lock.
        if self._gradients is None:
            object.__setattr__(self, "_gradients", self._gradients_of_all())
        return self._gradients

    def _gradients_of_all(self) -> list[Any]:
        listed = self.parameters
        if not listed or known(listed[0]) or len(set(map(id, listed))) == len(listed):
            try:
                return [parameter.grad for parameter in listed]
            except AttributeError:
                return [getattr(parameter, "grad", None) for parameter in listed]
        # A property may return a new object each time, and a parameter listed twice would count twice.
        each = {id(parameter): parameter for parameter in listed}
        grads = {key: getattr(parameter, "grad", None) for key, parameter in each.items()}
        return [grads[id(parameter)] for parameter in listed]

    def with_gradients(self, gradients: Sequence[Any]) -> "ParameterList":
        """Return the same parameters with other gradients than those in their `.grad`."""
        other = replace(self)
        object.__setattr__(other, "_gradients", list(gradients))
        return other

    def shards(self, gradients: Sequence[Any], parameters: Sequence[Any]) -> Shards:
        """Return this process's shards of gradients of these parameters. Partial sums are added over all processes."""
        object.__setattr__(self, "_summed", True)
        return shards_of(gradients, parameters)

    def take_part_in_sums(self) -> None:
        """Add partial sums for the other processes, if this one has not: it fails, and they wait for it."""
        if not self._summed and any_distributed(self.gradients):
            each = {id(p): (grad, p) for p, grad in zip(self.parameters, self.gradients, strict=True)}
            gradients, parameters = zip(*(one for one in each.values() if one[0] is not None), strict=True)
            self.shards(gradients, parameters)

    def check_all_hold(self) -> None:
        """Raise a TypeError that names the first parameter without a `.grad`."""
        for index, (parameter, grad) in enumerate(zip(self.parameters, self.gradients, strict=True)):
            if grad is None and not hasattr(parameter, "grad"):
                raise TypeError(
                    f"{self.name(index)} is of type {type(parameter).__name__}, which has no .grad. Pass the "
                    "parameters, such as model.parameters() or model.named_parameters(). For a tree of gradients, call "
                    "gradclip.clip_by_global_norm."
                )

    def check_no_engine_holds(self, *, some_lack: bool) -> None:
        """Raise a ValueError if a training engine holds the gradient of a parameter elsewhere than in its `.grad`.

        Unless some parameters lack a gradient, only the first is looked at.
        """
        for index, parameter in enumerate(self.parameters if some_lack else self.parameters[:1]):
            grad = self.gradients[index]
            entry = entry_of(parameter) if grad is None or index == 0 else None
            advice = load(entry).engine_of(parameter) if entry is not None else ""
            if advice:
                lacks = "has no .grad" if grad is None else "has a .grad that is not used"
                raise ValueError(f"{self.name(index)} {lacks}: {advice}.")

    def warn_of_no_gradient(self) -> None:
        """Warn that a call does nothing."""
        if (self.parameters or self.sizes) and not being_compiled():
            which = "" if self.choice.where is None else " that where chooses"
            warnings.warn(
                f"{_NO_GRADIENT}{which} has a gradient, so the norm is 0 and nothing is clipped. Call it after "
                "loss.backward() and before zero_grad(). An optimizer that steps within the backward pass leaves no "
                "gradients: for it, call gradclip.integrations.torch.clip_in_backward. An engine that holds the "
                "gradients leaves none either: call gradclip.clip_at_step(engine, max_norm).",
                UserWarning,
                stacklevel=level_of_caller(),
            )

    def name(self, index: int) -> str:
        """Return the name of a parameter, for errors."""
        if self.names and self.names[index] is not None:
            return str(self.names[index])
        for group, size in enumerate(self.sizes):
            if index < size:
                return f"parameters[{group}]['params'][{index}]"
            index -= size
        return f"parameters[{index}]"

    def names_for(self, argument: str) -> tuple[str, ...]:
        """Return the name of each parameter. Raises ValueError if one has none that the argument could match."""
        names = self.names or [None] * len(self.parameters)
        if None in names:
            advice = (
                "Make the optimizer with model.named_parameters(), or give each group the names under 'param_names'."
                if self.groups
                else "Pass model.named_parameters(), or a dict of names and parameters."
            )
            raise ValueError(f"{self.name(names.index(None))} has no name that {argument} could match. {advice}")
        return tuple(map(str, names))

    @property
    def named(self) -> list[Any]:
        """The process groups and meshes that the parameter groups name."""
        return [one for beside in self.beside if beside is not UNNAMED for one in beside]

    def beside_each(self) -> list[Any]:
        """Return, for each parameter, the process groups that its parameter group names."""
        if not self.sizes:
            return [UNNAMED] * len(self.parameters)
        return [named for named, size in zip(self.beside, self.sizes, strict=True) for _ in range(size)]


def _listed_of(group: dict[str, Any]) -> Sequence[Any]:
    try:
        return _with_names(group["params"])[0]
    except Exception:
        return ()


def reusable(parameters: Any) -> Any:
    """Return parameters that can be listed again: the items of an iterator as a list, else the parameters.

    An iterator without items stays as it is, so that `as_list` refuses it.
    """
    return (list(parameters) or parameters) if isinstance(parameters, Iterator) else parameters


def owners_of(parameters: Any) -> Sequence[Any]:
    """Return parameters as a list: also those of pairs, of a dict, and of groups that say nothing of clipping."""
    if not isinstance(parameters, list | tuple):
        return list(parameters.values()) if isinstance(parameters, Mapping) else [parameters]
    kinds, listed = set(map(type, parameters)), parameters
    if kinds == {tuple} and all(len(one) == 2 and type(one[0]) is str for one in parameters):
        listed = [one for _, one in parameters]
    elif kinds == {dict} and all(map(_says_nothing, parameters)):
        listed = list(chain.from_iterable(group["params"] for group in parameters))
    return listed if listed and hasattr(listed[0], "grad") else parameters


def _says_nothing(group: dict[Any, Any]) -> bool:
    """Return whether a group is a list of parameters, and no key tells how to clip them."""
    told = (key in _READ or _sets_clipping(key) for key in group if key not in ("params", "param_names"))
    return type(group.get("params")) is list and not any(told)


def repeatable(parameters: Parameters) -> Parameters:
    """Return the same, with the iterators of parameter groups as lists too."""
    parameters = reusable(parameters)
    if not (isinstance(parameters, list | tuple) and any(map(_yields_once, parameters))):
        return parameters
    return [{**one, "params": reusable(one["params"])} if _yields_once(one) else one for one in parameters]


def _yields_once(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("params"), Iterator)


def _with_names(parameters: Parameters) -> tuple[Sequence[Any], Sequence[str | None]]:
    """Return the parameters as a list, and their names if they have names."""
    if isinstance(parameters, Mapping) and not hasattr(parameters, "grad"):
        return _values(parameters), list(map(str, parameters))
    listed = as_list(parameters)
    if not listed or not isinstance(listed[0], tuple):
        return listed, ()
    if all(isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str) for one in listed):
        return [parameter for _, parameter in listed], [name for name, _ in listed]
    return listed, ()


def _values(parameters: Mapping[Any, Any]) -> list[Any]:
    values = list(parameters.values())
    if any(issubclass(kind, np.ndarray) for kind in set(map(type, values))):
        raise TypeError(
            f"parameters is a {type(parameters).__name__}, which may return copies of its arrays: clipping the copies "
            "would have no effect. Make a dict, arrays = dict(...), then clip and save its arrays."
        )
    return values


def as_list(parameters: Parameters) -> Sequence[Any]:
    """Return the parameters as a list. Raises if they are not iterable, or come from an exhausted generator."""
    if isinstance(parameters, list | tuple):
        return parameters
    if hasattr(parameters, "grad"):
        return [parameters]
    if not isinstance(parameters, Iterable) or getattr(parameters, "shape", None) == ():
        raise TypeError(
            "parameters must be an iterable of objects with a .grad, or one such object, got "
            f"{type(parameters).__name__}. Pass model.parameters(), or a list of parameters."
        )
    listed = list(parameters)
    if not listed and isinstance(parameters, Iterator):
        raise ValueError(
            f"parameters is a {type(parameters).__name__} that yields nothing: it was used up by an earlier loop, or "
            "the model has no parameters. Call model.parameters() again, or keep list(model.parameters())."
        )
    return listed


def checked_list(parameters: Parameters) -> Sequence[Any]:
    """Return the parameters as a list. Raises if one has no `.grad`, or if a generator is exhausted."""
    listed = as_list(parameters)
    ParameterList(listed).check_all_hold()
    return listed


def _are_groups(parameters: Parameters) -> bool:
    """Return whether these are parameter groups with lists of objects that have a `.grad`. False in case of doubt."""
    if not isinstance(parameters, list) or not parameters or not all(map(is_group, parameters)):
        return False
    listed = [group["params"] for group in parameters]
    return set(map(type, listed)) == {list} and all(hasattr(one, "grad") for params in listed for one in params)


def _is_array_tree(parameters: Parameters) -> bool:
    """Return whether the arrays themselves were passed, rather than objects with a `.grad`."""
    if isinstance(parameters, np.ndarray):
        return True
    if hasattr(parameters, "grad"):
        return False
    kinds = {type(leaf): leaf for leaf in flatten(parameters).leaves}
    return any(isinstance(leaf, np.ndarray) or lies_itself(leaf) for leaf in kinds.values())
