"""Steps whose values are not fetched yet. They may be in device memory, and nothing waits for them."""

import math
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np

from gradclip._src.annotations import Policy, StepPolicy
from gradclip._src.backends.on_host import fetched
from gradclip._src.backends.registry import framework_of, known
from gradclip._src.core.formats import dtype_name
from gradclip._src.core.nonfinite import AS_OF_A_CALL, Nonfinite
from gradclip._src.core.pipeline import EachNorm
from gradclip._src.monitor.records import Handling, Layers, Step, nan_or, narrowed
from gradclip._src.thresholds.history import check_between
from gradclip._src.tree import dotted, flatten
from gradclip._src.words import shown, typed

_LARGEST = (
    "If each layer is clipped on its own, record the largest norm and the layers' norms: "
    "monitor.record(gradclip.global_norm(norms, math.inf), max_norm, norms)."
)


class Note(NamedTuple):
    """What is said of a step beside its norm; None is nothing.

    The caller says its loss, whatever tells its batch from others, and its number, if that is above the last; a
    clipping call the norms of the gradients.
    """

    loss: Any = None
    context: Any = None
    step: int | None = None
    each: EachNorm | None = None

    @classmethod
    def of(cls, loss: object, context: object, *, alone: bool = False) -> "Note":
        """Check and hold a loss; if `alone`, it must be that of one step. Raises TypeError for what is no number."""
        if loss is not None:
            _check("loss", loss)
            if alone and _shape(loss):
                raise TypeError(f"loss must be a scalar, that of the next step, got shape {_shape(loss)}.")
            loss = _kept(loss)
        return cls(loss, context)

    def with_more(self, later: "Note") -> "Note":
        """Return a note with all that a later one says."""
        return Note(*[old if new is None else new for old, new in zip(self, later, strict=True)])


class Pending(NamedTuple):
    """The values of one step as scalars of any framework, or of several steps as vectors."""

    norm: Any
    max_norm: Any
    names: tuple[str, ...]
    layers: Sequence[Any]  # the norm of each layer, or one vector of all
    handling: Handling
    note: Note = Note()
    sampled: bool = True  # whether the layers belong to what is kept of each step
    missed: bool = False  # whether the call raised instead of clipping

    @classmethod
    def of(
        cls,
        norm: object,
        max_norm: object,
        layer_norms: object,
        nonfinite: Policy | StepPolicy,
        names: tuple[str, ...] | None,
        skip_above: float = math.inf,
    ) -> "Pending":
        """Check and hold the values to record. Raises TypeError for a value that is not numeric or is traced."""
        # Variables of flax's nnx hold an array.
        if callable(inside := getattr(norm, "__jax_array__", None)):
            norm = inside()
        if callable(inside := getattr(max_norm, "__jax_array__", None)):
            max_norm = inside()
        threshold = max_norm
        if getattr(max_norm, "_layers", None) is not None:
            raise TypeError(
                "this AdaptiveThreshold has a norm for each layer, not one for the step. Pass monitor= where you clip."
            )
        if not known(max_norm) and hasattr(max_norm, "max_norm"):
            threshold, skip_above = max_norm.max_norm, getattr(max_norm, "skip_above", skip_above)
            if callable(inside := getattr(threshold, "__jax_array__", None)):
                threshold = inside()
            if threshold is None:
                raise TypeError("max_norm has clipped nothing yet, so it has no threshold. Clip first, then record.")
        _check("norm", norm)
        _check("max_norm", threshold, norm)
        factor = check_between("skip_above", skip_above, 1.0, math.inf)
        layers: Sequence[Any] = ()
        if names is not None:
            _check_vector(layer_norms, names, norm)
            layers = [layer_norms]
        elif layer_norms is not None:
            flat = flatten(layer_norms)
            layers, names = flat.leaves, tuple(flat.paths())
            for layer in layers:
                _check("layer_norms", layer, norm)
        handling = Handling(Nonfinite.named(AS_OF_A_CALL.get(nonfinite, nonfinite)).name, factor)
        held = [_kept(layer) for layer in layers]
        return cls(_kept(norm), _kept(threshold), dotted(names or ()), held, handling)

    @classmethod
    def of_missed(cls) -> "Pending":
        """Return what stands for a call that raised."""
        return cls(math.nan, math.nan, (), (), Handling("raise"), sampled=False, missed=True)

    def plain(self) -> tuple[Any, ...]:
        """Return the values in a tuple, for a copy of a monitor."""
        values = self._replace(note=self.note[:3], handling=tuple(self.handling))  # type: ignore[arg-type]
        return tuple(values)

    @classmethod
    def of_plain(cls, *values: Any) -> "Pending":
        """Return the values again."""
        made = cls(*values)
        return made._replace(handling=Handling(*made.handling), note=Note(*made.note))

    def noted(self, note: Note, *, sampled: bool) -> "Pending":
        """Return the values with what is said of them. Raises ValueError unless it is said of as many steps.

        Norms of layers that the caller did not pass are `sampled` for the step, or else only for a spike.
        """
        if note.loss is not None:
            _check("loss", note.loss, self.norm)
        if note.context is not None and _shape(self.norm):
            each = getattr(note.context, "shape", None) != () and isinstance(note.context, Sized)
            if not each or isinstance(note.context, str | Mapping) or len(note.context) != self.steps:
                raise ValueError(
                    f"context must be a list or an array with one entry for each of {self.steps} steps, got "
                    f"{shown(note.context)}."
                )
        said = self._replace(note=note._replace(each=None))
        if note.each is None or note.each.names is None or self.layers:
            return said
        return said._replace(names=dotted(tuple(note.each.names)), layers=[_kept(note.each.norms)], sampled=sampled)

    def contexts_of(self, steps: int) -> Sequence[Any]:
        """Return the context of each step."""
        context = self.note.context
        return context if context is not None and _shape(self.norm) else [context] * steps

    @property
    def steps(self) -> int:
        """The number of steps."""
        shape = _shape(self.norm)
        return shape[0] if shape else 1

    @property
    def vectors(self) -> list[Any]:
        """All values to fetch."""
        said = () if self.note.loss is None else (self.note.loss,)
        return [self.norm, self.max_norm, *self.layers, *said]


class FetchedStep(NamedTuple):
    """A step that is fetched, its layer norms, also those not kept with it, and what the caller said of it."""

    step: Step
    layers: Layers | None
    context: Any = None
    missed: bool = False


def resolved(pending: Sequence[Pending], first: int) -> Iterator[FetchedStep]:
    """Fetch the values of all pending steps together, and yield the steps, numbered from `first`.

    A call that raised has the number of the step that it would have been.
    """
    numbers = iter(fetched([value for one in pending for value in one.vectors]))
    for one in pending:
        first = max(first, one.note.step or 0)
        skips, skip_above = Nonfinite.named(one.handling.nonfinite).blanks, one.handling.skip_above
        norms, max_norms, *layers = [next(numbers) for _ in one.vectors]
        several = max_norms.tolist() * (len(norms) if len(max_norms) == 1 else 1)
        losses = [math.nan] * len(norms) if one.note.loss is None else list(map(nan_or, layers.pop().tolist()))
        rows = _rows(layers, len(norms), len(one.names))
        each = zip(norms.tolist(), several, rows, losses, one.contexts_of(len(norms)), strict=True)
        for norm, max_norm, row, loss, context in each:
            skipped = skips if not math.isfinite(norm) else norm > skip_above * max_norm
            found = None if row is None else Layers(one.names, row)
            step = Step(first, norm, max_norm, skipped, found if one.sampled else None, loss)
            yield FetchedStep(step, found, context, one.missed)
            first += not one.missed


def resolved_each(pending: Sequence[Pending], first: int) -> tuple[list[FetchedStep], Exception | None]:
    """Return the steps that can be fetched, and the first error, if any. One bad value loses no other step."""
    try:
        return list(resolved(pending, first)), None
    except Exception as error:
        seen: list[FetchedStep] = []
        for one in pending if len(pending) > 1 else ():
            seen += resolved_each([one], max([first, *(x.step.step + 1 for x in seen if not x.missed)]))[0]
        return seen, error


def named(names: object) -> tuple[str, ...] | None:
    """Return the names of layers; None for None. Raises TypeError unless they are strings."""
    if names is None:
        return None
    try:
        found = None if isinstance(names, str) else tuple(names)  # type: ignore[arg-type, var-annotated]
    except TypeError:
        found = None
    if found is None or not all(isinstance(name, str) for name in found):
        raise TypeError(f"names must be the names of the layers, a list of strings, got {shown(names)}.")
    return found


def _rows(layers: Sequence[np.ndarray], steps: int, count: int) -> Sequence[np.ndarray | None]:
    """Return the layer norms of each step."""
    if not layers:
        return [None] * steps
    table = np.concatenate(layers).reshape(count, steps).T
    narrow = narrowed(table)
    # Each step by itself, as a state that is loaded does it.
    return list(narrow) if narrow is not table else [narrowed(row) for row in table]


def norm_and_threshold(state: Any) -> tuple[object, object]:
    """Return what is to be recorded of a state. Raises TypeError for what has no norm and no threshold."""
    if known(state) or not (hasattr(state, "norm") and hasattr(state, "max_norm")):
        raise TypeError(
            f"max_norm is missing. Pass record(norm, max_norm), or what has both, such as an AdaptiveThreshold, not "
            f"{typed(state)}."
        )
    return state.norm, state


def _kept(value: Any) -> Any:
    # Keep a copy: before the fetch, a threshold may change in place, and JAX may delete a donated array.
    framework = framework_of(value)
    return value if framework is None else framework.kept(value)


def _check(name: str, value: object, like: object = None) -> None:
    _check_array(name, value)
    shape, wanted = _shape(value), _shape(like)
    if len(shape) > 1:
        raise TypeError(f"{name} must be a scalar, or a vector with one entry per step, got shape {shape}.")
    if like is not None and shape != wanted and (name != "max_norm" or shape):
        hint = " For a vector of the layers at one step, pass names=." if name == "layer_norms" and not wanted else ""
        raise ValueError(f"{name} must have the shape of norm, {wanted}, got {shape}: one entry per step.{hint}")


def _check_vector(layer_norms: object, names: tuple[str, ...], norm: object) -> None:
    """Check the layer norms of one step, given as one vector."""
    if layer_norms is None:
        raise TypeError(f"names are those of a vector of layer_norms, got names {shown(names)} and no layer_norms.")
    _check_array("layer_norms", layer_norms)
    shape, wanted = _shape(layer_norms), (len(names),)
    if shape != wanted or _shape(norm):
        raise ValueError(
            f"with names, layer_norms must be a vector for one step, of shape {wanted}, and norm a scalar; got shapes "
            f"{shape} and {_shape(norm)}."
        )


def _check_array(name: str, value: object) -> None:
    if not known(value) or not _is_real(value):
        several = isinstance(value, list | tuple | Mapping) and name == "norm"
        raise TypeError(
            f"{name} must be a number or an array, got {typed(value)}. "
            + (_LARGEST if several else "Pass what the clipping call returned.")
        )
    framework = framework_of(value)
    if framework is not None and framework.is_traced(value):
        raise TypeError(
            f"{name} is traced: it has no value yet. Return it from the compiled function and record it outside."
        )


def _is_real(value: Any) -> bool:
    """Say whether a value is a real number that a float holds, or an array of real numbers."""
    if framework_of(value) is not None:
        kind = getattr(getattr(value, "dtype", None), "kind", "f")
        return kind not in "OSUmMVc" and not dtype_name(value).startswith("complex")
    try:
        float(value)
    except (TypeError, OverflowError):
        return False
    return True


def _shape(value: object) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))
