"""Clip in place with several norms: each gradient of parameters, each layer of a tree of NumPy arrays, or each unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, Unpack, overload

import numpy as np
import optree

from gradclip._src import look
from gradclip._src.annotations import (
    Integers,
    Meshes,
    Ord,
    Owners,
    Parameters,
    Policy,
    ProcessGroups,
    Tensor,
    Threshold,
    Thresholds,
    Where,
)
from gradclip._src.backends.registry import find
from gradclip._src.core.decision import Clipping, Each
from gradclip._src.core.layouts import Groups, Several
from gradclip._src.core.nonfinite import Nonfinite
from gradclip._src.core.norms import Order
from gradclip._src.core.protocols import Backend
from gradclip._src.core.rules import CLIP
from gradclip._src.distributed.processes import ONE_PROCESS, Processes, processes_of, telling
from gradclip._src.inplace.driver import clip_parts
from gradclip._src.inplace.gradients import Gradients, Taken, entered, others_left
from gradclip._src.inplace.groups import threshold_of_each
from gradclip._src.inplace.watched import ClipsWatched, clip_watched
from gradclip._src.monitor.monitor import Monitor
from gradclip._src.passed.arguments import check_monitor, check_thresholds, in_place, is_single_threshold
from gradclip._src.passed.leaves import choice_of, layers_of, names_in, split_by
from gradclip._src.passed.parameters import ParameterList, as_tuple, have_thresholds, owners_of, repeatable, reusable
from gradclip._src.public import public
from gradclip._src.thresholds.history import identity
from gradclip._src.thresholds.holder import AdaptiveThreshold
from gradclip._src.tree import FlatTree, flatten
from gradclip._src.words import typed


class Call(NamedTuple):
    """A call with many norms: its name, its parameters, and the processes that hold their gradients."""

    name: str
    params: ParameterList
    processes: Processes

    @classmethod
    def of(
        cls,
        name: str,
        parameters: Parameters,
        process_group: ProcessGroups,
        mesh: Meshes,
        where: Where,
        integers: Integers,
        *,
        own_thresholds: bool = True,
    ) -> Call:
        """List the parameters. Errors also reach the other processes, if any are named.

        `own_thresholds`: parameter groups may have some.
        """
        if process_group is None and mesh is None:
            parameters = reusable(parameters)
        with telling(parameters, process_group, mesh, each=True):
            alone = not (as_tuple(process_group) or as_tuple(mesh))
            listed = ParameterList.of(parameters, own_thresholds=own_thresholds)
            params = others_left(listed, choice_of(where, integers), alone=alone)
        return cls(name, params, processes_of(params, process_group, mesh, each=True))

    def spelled_out(self, max_norm: Thresholds) -> Any:
        """Return the thresholds, without patterns of names and groups. Raises like `parts_of`."""
        return threshold_of_each(self.params, max_norm, alone=self.processes is ONE_PROCESS)

    @property
    def lacking(self) -> set[int]:
        """The ids of the parameters without a gradient on this process, which others may have."""
        if self.processes is ONE_PROCESS:
            return set()
        return {id(p) for p, grad in zip(self.params.parameters, self.params.gradients, strict=True) if grad is None}

    def ask(self, clipping: Clipping, /, **arguments: object) -> None:
        """Record the arguments, which must be the same on all processes. Thresholds are lists of numbers."""
        self.processes.ask(
            clipping.order,
            clipping.nonfinite,
            more=[("function", self.name), *arguments.items(), *self.params.choice.told],
        )

    def taken(self, *scalars: object, shape: Callable[[Any], Sequence[int]] = lambda _: (0,)) -> Taken:
        """Return the gradients, after all checks, with something in the place of those that only others may have.

        `shape` returns the shape of that from the part of a parameter that this process has.
        """
        params = self.processes.filled(self.params, shape)
        return entered(params, self.processes, *scalars, to_write=True, apart=True)


@dataclass(frozen=True)
class Layerwise:
    """The unique layers of a call, as the indices of their gradients, and their thresholds.

    `arranged` puts the norms of the layers into the caller's structure.
    """

    groups: Groups
    thresholds: Sequence[Any]
    arranged: Callable[[Sequence[Any]], Any]

    @classmethod
    def of(
        cls,
        params: ParameterList,
        max_norm: Thresholds,
        backend: Backend,
        gradients: Gradients,
        observe: Callable[[Sequence[Any]], None] | None = None,
    ) -> Layerwise:
        """Make each parameter, or each part of a tree, a layer; `arranged` also has `observe` see the norms.

        Raises ValueError if the thresholds do not fit, or if arrays of a tree, which cannot be replaced, share memory
        but are in different layers.
        """
        if gradients.tree is not None:
            return cls._of_tree(gradients.tree, max_norm, backend, gradients, observe)
        grads = gradients.params.gradients
        max_norms: Sequence[object]
        if is_single_threshold(max_norm) and not getattr(max_norm, "shape", ()):
            max_norms = [max_norm] * len(grads)
        elif isinstance(max_norm, list | tuple):
            max_norms = max_norm
        else:
            advice = getattr(max_norm, "_instead_of_threshold", "")
            raise TypeError(f"{_one_for_each(grads)}, got {typed(max_norm)}. {advice}".rstrip())
        if len(max_norms) != len(grads):
            raise ValueError(f"{_one_for_each(grads)}, got a list of {len(max_norms)}.")
        thresholds = check_thresholds(max_norms, backend)
        filled = [number for number, grad in enumerate(grads) if grad is not None]
        owners = [params.parameters[number] for number in filled]

        def arranged(norms: Sequence[Any]) -> list[Any]:
            left = gradients.params.left
            zero = _zero(backend, gradients.grads) if left else None
            every = [zero if id(parameter) in left else None for parameter in params.parameters]
            for number, norm in zip(filled, norms, strict=True):
                if id(params.parameters[number]) not in left:
                    every[number] = norm
            if observe is not None:
                observe(every)
            for number in filled:
                if params.gradients[number] is None and id(params.parameters[number]) not in left:
                    every[number] = None  # only others have it
            return every

        own = [thresholds[number] for number in filled]
        return cls._once(owners, Groups.each_alone(len(filled)), own, arranged, None, gradients)

    @classmethod
    def _of_tree(
        cls,
        flat: FlatTree,
        max_norm: Thresholds,
        backend: Backend,
        gradients: Gradients,
        observe: Callable[[Sequence[Any]], None] | None,
    ) -> Layerwise:
        single = is_single_threshold(max_norm)
        prefix, layers = layers_of(flat) if single else split_by(flat, max_norm)
        thresholds = check_thresholds([max_norm] * layers.count if single else prefix.leaves, backend)
        zero = _zero(backend, flat.leaves)

        def arranged(norms: Sequence[Any]) -> Any:
            if observe is not None:
                observe(norms)
            return prefix.arrange(norms)

        return cls._once(flat.leaves, layers, thresholds, arranged, zero, gradients)

    @classmethod
    def _once(
        cls,
        owners: Sequence[Any],
        layers: Groups,
        thresholds: Sequence[Any],
        rebuild: Callable[[Sequence[Any]], Any],
        of_nothing: Any,
        gradients: Gradients,
    ) -> Layerwise:
        """Return layers, given by indices of owners, without duplicates. `of_nothing` is the norm of an empty one."""
        groups: Sequence[Any] = layers.groups
        firsts: Sequence[int] = range(layers.count)
        if len(owners) > len(gradients.grads) or gradients.meeting:
            groups = _by_gradients(owners, groups, thresholds, gradients)
            known: dict[Any, int] = {}
            firsts = [known.setdefault(group, number) for number, group in enumerate(groups)]
        elif all(groups):
            return cls(layers, thresholds, rebuild)
        kept = [number for number, group in enumerate(groups) if group and firsts[number] == number]

        def arranged(norms: Sequence[Any]) -> Any:
            norm_of = dict(zip(kept, norms, strict=True))
            return rebuild([norm_of.get(number, of_nothing) for number in firsts])

        chosen = Groups([groups[number] for number in kept], alone=len(kept) == len(gradients.grads))
        return cls(chosen, [thresholds[number] for number in kept], arranged)


def _zero(backend: Backend, leaves: Sequence[Any]) -> Any:
    """Return the norm of what does not count."""
    with backend.precision():
        return backend.leave_scalar(backend.zeros((), ()), "float32", leaves)


def _by_gradients(
    owners: Sequence[Any], layers: Sequence[Sequence[int]], thresholds: Sequence[Any], gradients: Gradients
) -> list[tuple[int, ...]]:
    """Return the indices of each layer's gradients. Raises ValueError if layers share some, but not a threshold."""
    places = {id(owner): index for index, owner in enumerate(gradients.owners)}
    groups = [tuple(sorted({places[id(owners[index])] for index in layer})) for layer in layers]
    asked = dict(zip(groups, thresholds, strict=True))
    differ = any(
        asked[group] is not c and asked[group] != c for group, c in zip(groups, thresholds, strict=True) if group
    )
    layer_of = {index: group for group in asked for index in group}
    if differ or len(layer_of) < sum(map(len, asked)):
        raise ValueError(
            "a parameter or array occurs twice, in two layers or with two thresholds, so its threshold is "
            "ambiguous. Pass it once."
        )
    for meeting in () if gradients.apart else gradients.meeting:
        if len({layer_of[index] for index in meeting}) > 1:
            raise ValueError(
                f"{gradients.named(meeting)} share memory, so they cannot be scaled by different numbers in place. "
                "Pass copies, or call a function that returns new arrays, such as gradclip.clip_by_layer_norm."
            )
    return groups


def _one_for_each(grads: Sequence[Any]) -> str:
    return f"max_norm must be a number, or a list with one number for each of the {len(grads)} parameters, in order"


Given = look.Look | look.OnDevice


def clip_at_once(
    parameters: Parameters,
    settings: tuple[Ord, Policy],
    layout_of: Callable[[Sequence[Any]], Several | None],
    thresholds_of: Callable[[Given, Several, Order], Any],
) -> Any:
    """Clip gradients that no other process shares; return their norms in the caller's structure.

    `settings` are the order and the policy. `layout_of` returns the layout of the gradients, `thresholds_of` one
    threshold, or one for each norm, or None. None, with nothing changed, if one look does not settle all norms.
    """
    given = look.gradients(parameters)
    if given is None or len(set(map(id, given.leaves))) < len(given.leaves):  # an empty one may be listed twice
        return None
    order, policy, layout = Order.parse(settings[0]), Nonfinite.named(settings[1]), layout_of(given.leaves)
    if layout is None:
        return None
    if not isinstance(given, look.Look):
        thresholds = thresholds_of(given, layout, order) if isinstance(layout, Groups) else None
        norms = None if thresholds is None else given.clip_each_(thresholds, order, policy)
        return None if norms is None else _arranged(parameters, norms, given)
    thresholds = thresholds_of(given, layout, order) if given.kernels.writable else None
    norm = None if thresholds is None else given.clip_several_(layout, thresholds, order)
    return None if norm is None else _arranged(parameters, given.left(layout, norm), given)


def numbers(parameters: Parameters, max_norm: Thresholds, given: Given, layout: Several, _: Order) -> Any:
    """Return thresholds that are numbers: one for all gradients, or one for each. None if they are not known."""
    found = _thresholds(parameters, max_norm, given)
    if found is None or not isinstance(given, look.Look):
        return found
    return layout.each(found) if isinstance(found, list) else np.array([found], float)


def following(
    parameters: Parameters,
    weights: object,
    both: tuple[Threshold, Threshold],
    given: Given,
    layout: Several,
    order: Order,
) -> Any:
    """Return thresholds that follow the norms of weights of the same shapes. None if they are not ordinary."""
    clipping, eps = map(look.known_threshold, both)
    if clipping is None or eps is None or isinstance(layout, Groups) or not isinstance(given, look.Look):
        return None
    listed = owners_of(parameters)
    beside = listed if weights is None else weights
    if not isinstance(beside, list | tuple) or len(beside) != len(listed) or _is_tree(given):
        return None
    if len(listed) > len(given.leaves):
        beside = [weight for weight, owner in zip(beside, listed, strict=True) if owner.grad is not None]
    return given.following(beside, layout, order, (clipping, eps))


def _thresholds(parameters: Parameters, max_norm: Thresholds, given: Given) -> Any:
    """Return one threshold for all gradients, or a list with one for each; None if they are not known."""
    if isinstance(max_norm, list | tuple):
        listed = owners_of(parameters)
        known = look.known_thresholds(max_norm) if len(max_norm) == len(listed) and not _is_tree(given) else None
        if known is None or len(known) == len(given.leaves):
            return known
        return [limit for limit, owner in zip(known, listed, strict=True) if owner.grad is not None]
    threshold = look.known_threshold(max_norm)
    return threshold if threshold is not None or isinstance(given, look.Look) else given.threshold(max_norm)


def _is_tree(given: Given) -> bool:
    """Say whether the gradients themselves were passed, as a tree of NumPy arrays."""
    return isinstance(given.leaves[0], np.ndarray)


def _arranged(parameters: Parameters, norms: Sequence[Any], given: Given) -> Any:
    """Return the norms in the structure of the parameters: None where there is no gradient."""
    if _is_tree(given):
        return optree.tree_unflatten(optree.tree_structure(parameters), norms)
    listed = owners_of(parameters)
    if len(listed) == len(norms):
        return list(norms)
    found = iter(norms)
    return [None if owner.grad is None else next(found) for owner in listed]


class _Follower(NamedTuple):
    """An `AdaptiveThreshold` at a call: the names of the layers, and their thresholds as a vector.

    `listed` are the parameters, if nothing more was said of them; `flat` is the tree, if one was passed.
    """

    adaptive: AdaptiveThreshold
    names: tuple[str, ...]
    limits: Any
    settings: tuple[Order, Nonfinite]
    listed: Sequence[Any] | None
    flat: FlatTree | None

    @classmethod
    def of(
        cls, adaptive: AdaptiveThreshold, parameters: Parameters, order: Order, policy: Nonfinite, *, whole: bool
    ) -> _Follower:
        """`whole`: no argument says that processes have parts of the parameters."""
        params = ParameterList.of(parameters, own_thresholds=True)
        if have_thresholds(params.groups):
            raise ValueError(
                "a parameter group has the key 'max_norm', a threshold of its own, but an AdaptiveThreshold sets that "
                "of each layer. Leave the key out, or pass a number as max_norm."
            )
        flat = None if params.tree is None else flatten(params.tree)
        names = _names(params, flat, whole=whole and not params.named)
        return cls(adaptive, names, adaptive._for_layers(names, order), (order, policy), params.flat, flat)

    def thresholds(self) -> Any:
        """Return the thresholds in the structure of the parameters."""
        if isinstance(self.limits, np.ndarray):
            each = self.limits.tolist()
        else:  # made wide together: one by one, that takes an operation for each
            wide: Any = find([self.limits], lambda: ["max_norm"]).scalar(self.limits, ())
            each = list(wide)
        return each if self.flat is None else self.flat.arrange(each)

    def observe(self, norms: Sequence[Any]) -> None:
        """Observe the norms of the layers, None where no process has a gradient."""
        self.adaptive._observe_layers(self.names, norms, self.limits, *self.settings)


def _names(params: ParameterList, flat: FlatTree | None, *, whole: bool) -> tuple[str, ...]:
    """Return the identity of each parameter, or leaf; with its shape, which tells two apart, if it is `whole`."""
    listed, sizes = params.parameters if flat is None else flat.leaves, enumerate(params.sizes)
    grouped = [f"parameters[{group}]['params'][{place}]" for group, size in sizes for place in range(size)]
    places = grouped or [f"parameters[{place}]" for place in range(len(listed))]
    own = [name or place for name, place in zip(params.names or places, places, strict=True)] if flat is None else []
    shapes = [tuple(getattr(one, "shape", ())) if whole else None for one in listed]
    return tuple(map(identity, own if flat is None else names_in(flat), shapes))


_MaxNorms: TypeAlias = Thresholds | AdaptiveThreshold


@overload
def clip_grad_layer_norm_(
    parameters: Owners[Tensor], max_norm: _MaxNorms, **options: Unpack[ClipsWatched]
) -> list[Tensor | None]: ...
@overload
def clip_grad_layer_norm_(parameters: Parameters, max_norm: _MaxNorms, **options: Unpack[ClipsWatched]) -> Any: ...
@public
@in_place
def clip_grad_layer_norm_(
    parameters: Parameters,
    max_norm: Thresholds | AdaptiveThreshold,
    *,
    ord: Ord = 2,
    nonfinite: Policy = "propagate",
    process_group: ProcessGroups = None,
    mesh: Meshes = None,
    monitor: Monitor | None = None,
    where: Where = None,
    integers: Integers = "keep",
) -> Any:
    """Scale each gradient of `parameters` in place by min(1, max_norm / its own norm).

    Args:
        parameters: as in `clip_grad_norm_`. If gradients share memory, all but one get
            memory of their own, because each is scaled by its own number. Arrays of a tree cannot be replaced, so only
            those below one threshold of a prefix may share memory.
        max_norm: the threshold of each gradient, >= 0: a number, or a list with one threshold per parameter. A dict
            maps patterns of names to thresholds, and groups have their own, as in `clip_grad_norm_`; each gradient has
            a norm of its own all the same. For a tree of NumPy arrays, a number, a prefix of the tree, as in
            `gradclip.clip_by_layer_norm`, or a dict of patterns of which one has a wildcard, such as "*". A
            `gradclip.AdaptiveThreshold` gives each gradient a threshold that follows its own norms.
        ord: which norm, as in `gradclip.global_norm`.
        nonfinite: what to do if a gradient contains NaN or infinity, as in `gradclip.clip_by_global_norm`.
        process_group: the processes that each hold a part of every gradient, as in `clip_grad_norm_`. All of them pass
            the same parameters. Leave it out for distributed tensors, and where each process holds whole layers, as
            pipeline stages do.
        mesh: the same, given as a mesh.
        monitor: a `gradclip.Monitor` that records, after each successful call, the norm that is the largest multiple of
            its threshold, and that threshold: a step counts as clipped if a layer was.
        where: which gradients count, as in `clip_grad_norm_`. A list of thresholds has one for each parameter all the
            same.
        integers: "raise" refuses integers, as there.

    Returns:
        The norms before clipping: a list with one norm per parameter, None for a parameter without a gradient, 0
        for one that does not count. For a tree of NumPy arrays, a tree of norms with the structure of the tree, or of
        `max_norm` if that is a prefix. If
        processes hold parts of a gradient, all of them get the norm of the whole.

    Raises:
        ValueError: `max_norm` is a list of the wrong length, or arrays of a tree share memory
            but not a threshold. Other errors are those of `clip_grad_norm_`.

    After an error, the gradients are unchanged.

    >>> import numpy as np
    >>> update = {"w": np.array([3.0, 4.0]), "b": np.array([0.5])}
    >>> norms = clip_grad_layer_norm_(update, max_norm=1.0)
    >>> float(norms["w"]), update["w"].round(6).tolist(), update["b"].tolist()
    (5.0, [0.6, 0.8], [0.5])

    """
    follower: _Follower | None = None
    if isinstance(max_norm, AdaptiveThreshold):
        with telling(parameters, process_group, mesh, each=True):
            parameters = repeatable(parameters)
            settings, whole = (Order.parse(ord), Nonfinite.named(nonfinite)), process_group is None and mesh is None
            follower = _Follower.of(max_norm, parameters, *settings, whole=whole)
    limits: Thresholds = max_norm if follower is None else follower.thresholds()  # type: ignore[assignment]
    if process_group is None and mesh is None and monitor is None and where is None and integers == "keep":
        parameters = reusable(parameters)
        listed = parameters if follower is None or follower.listed is None else follower.listed
        norms = clip_at_once(listed, (ord, nonfinite), _layers, partial(numbers, listed, limits))
        if norms is not None:
            if follower is not None:
                follower.observe(norms if follower.flat is None else flatten(norms).leaves)
            return norms
    call = Call.of("clip_grad_layer_norm_", parameters, process_group, mesh, where, integers)
    with call.processes.preparing():
        check_monitor(monitor)
        clipping = Clipping(None, Order.parse(ord), Nonfinite.named(nonfinite), CLIP)
        limits = call.spelled_out(limits)
        scalars = [limits] if is_single_threshold(limits) else flatten(limits).leaves
        call.ask(clipping, max_norm=scalars)
        taken = call.taken(*scalars)
        observe = None if follower is None else follower.observe
        layers = Layerwise.of(call.params, limits, taken.backend, taken.gradients, observe)
    with taken.backend.precision():
        asked = layers.groups, Each(layers.thresholds), clipping, call.processes.holders(taken.backend)
        if monitor is None:
            return layers.arranged(clip_parts(taken, *asked))
        return clip_watched(taken, *asked, (monitor, call.processes is ONE_PROCESS), layers.arranged)


def _layers(leaves: Sequence[Any]) -> Groups:
    return Groups.each_alone(len(leaves))
