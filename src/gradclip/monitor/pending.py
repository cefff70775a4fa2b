"""Steps on their way to the reader: values that are not fetched yet, and steps that a callback is still to be told of.

Values may be in device memory, and nothing waits for them.
"""

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from threading import Condition, get_ident
from typing import Any, NamedTuple

import numpy as np

from gradclip.adaptive.settings import check_between
from gradclip.backends.on_host import fetched
from gradclip.backends.registry import framework_of, known
from gradclip.core.formats import dtype_name
from gradclip.core.nonfinite import SKIP, Nonfinite
from gradclip.monitor.records import Layers, Step, narrowed
from gradclip.tree import flatten
from gradclip.typing import Policy

_LARGEST = (
    "If each layer is clipped on its own, record the largest norm and the layers' norms: "
    "monitor.record(gradclip.global_norm(norms, math.inf), max_norm, norms)."
)


class Pending(NamedTuple):
    """The values of one step as scalars of any framework, or of several steps as vectors."""

    norm: Any
    max_norm: Any
    names: tuple[str, ...]
    layers: Sequence[Any]  # the norm of each layer, or one vector of all
    skip_above: float
    skips: bool  # whether a non-finite norm skips the step

    @classmethod
    def of(
        cls,
        norm: object,
        max_norm: object,
        layer_norms: object,
        nonfinite: Policy,
        names: tuple[str, ...] | None,
        skip_above: float = math.inf,
    ) -> "Pending":
        """Check and hold the values to record. Raises TypeError for a value that is not numeric or is traced."""
        threshold = max_norm
        if not known(max_norm) and hasattr(max_norm, "threshold"):
            threshold, skip_above = max_norm.threshold, getattr(max_norm, "skip_above", math.inf)
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
        skips = Nonfinite.named(nonfinite) is SKIP
        held = [_kept(layer) for layer in layers]
        return cls(_kept(norm), _kept(threshold), _dotted(names or ()), held, factor, skips)

    @property
    def steps(self) -> int:
        """The number of steps."""
        shape = _shape(self.norm)
        return shape[0] if shape else 1

    @property
    def vectors(self) -> list[Any]:
        """All values to fetch."""
        return [self.norm, self.max_norm, *self.layers]


def resolved(pending: Sequence[Pending], first: int) -> Iterator[Step]:
    """Fetch the values of all pending steps together, and yield the steps, numbered from `first`."""
    numbers = iter(fetched([value for one in pending for value in one.vectors]))
    for one in pending:
        norms, max_norms, *layers = [next(numbers) for _ in one.vectors]
        several = max_norms.tolist() * (len(norms) if len(max_norms) == 1 else 1)
        rows = _rows(layers, len(norms), len(one.names))
        for norm, max_norm, row in zip(norms.tolist(), several, rows, strict=True):
            skipped = one.skips if not math.isfinite(norm) else norm > one.skip_above * max_norm
            yield Step(first, norm, max_norm, skipped, None if row is None else Layers(one.names, row))
            first += 1


def resolved_each(pending: Sequence[Pending], first: int) -> tuple[list[Step], Exception | None]:
    """Return the steps that can be fetched, and the first error, if any. One bad value loses no other step."""
    try:
        return list(resolved(pending, first)), None
    except Exception as error:
        steps: list[Step] = []
        for one in pending if len(pending) > 1 else ():
            steps += resolved_each([one], first + len(steps))[0]
        return steps, error


def named(names: object) -> tuple[str, ...] | None:
    """Return the names of layers; None for None. Raises TypeError unless they are strings."""
    if names is None:
        return None
    try:
        found = None if isinstance(names, str) else tuple(names)  # type: ignore[arg-type, var-annotated]
    except TypeError:
        found = None
    if found is None or not all(isinstance(name, str) for name in found):
        raise TypeError(f"names must be the names of the layers, a list of strings, got {names!r:.80}.")
    return found


class Callbacks:
    """Steps that a callback is still to be told of. One thread at a time tells them, in their order.

    If another thread adds steps meanwhile, the first goes on with them. So a callback may read the monitor, and may
    wait for other threads that read it.
    """

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()
        self._teller: int | None = None
        self._idle = Condition()

    def add(self, steps: Iterable[Step]) -> None:
        """Add steps. Calls of this method must be in the order of the steps."""
        self._steps.extend(steps)

    def tell(self, callback: Callable[[Step], object]) -> Exception | None:
        """Call the callback for all steps, unless some thread is doing so; return its first error."""
        with self._idle:
            if self._teller is not None:
                return None
            self._teller = get_ident()
        error: Exception | None = None
        try:
            while (step := self._next()) is not None:
                try:
                    callback(step)
                except Exception as raised:
                    error = error or raised
        finally:
            self._stop()
        return error

    def wait(self) -> None:
        """Wait until no other thread tells steps."""
        with self._idle:
            self._idle.wait_for(lambda: self._teller in (None, get_ident()))

    def _next(self) -> Step | None:
        with self._idle:
            if not self._steps:
                self._teller = None  # together with the look: what is added from now on is told by who adds it
                return None
            return self._steps.popleft()

    def _stop(self) -> None:
        with self._idle:
            if self._teller == get_ident():
                self._teller = None
            self._idle.notify_all()


def _rows(layers: Sequence[np.ndarray], steps: int, count: int) -> Sequence[np.ndarray | None]:
    """Return the layer norms of each step."""
    if not layers:
        return [None] * steps
    table = np.concatenate(layers).reshape(count, steps).T
    narrow = narrowed(table)
    # Each step by itself, as a state that is loaded does it.
    return list(narrow) if narrow is not table else [narrowed(row) for row in table]


def _kept(value: Any) -> Any:
    # Keep a copy: before the fetch, a threshold may change in place, and JAX may delete a donated array.
    framework = framework_of(value)
    return value if framework is None else framework.kept(value)


# Cached, so all steps share one tuple of layer names.
@lru_cache(maxsize=64)
def _dotted(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Shorten `['layer'][0]` to layer.0, to save room in pictures, and number the names that become equal."""
    shorter = [re.sub(r"\[(?:'([^']*)'|(\d+))\]", r".\1\2", path).strip(".") or "all" for path in paths]
    found: dict[str, None] = {}
    for name in shorter:
        unique, number = name, 1
        while unique in found:
            number += 1
            unique = f"{name} ({number})"
        found[unique] = None
    return tuple(found)


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
        raise TypeError(f"names are those of a vector of layer_norms, got names {names!r:.80} and no layer_norms.")
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
            f"{name} must be a number or an array, got {value!r:.80} of type {type(value).__name__}. "
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
