"""What the rules have in common: they compute a threshold from the norms of past steps.

A rule is a frozen value, and its history is a tuple of arrays. `AdaptiveThreshold` holds both, for loops that clip in
place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any, ClassVar

import numpy as np

from gradclip._src.annotations import HasDtype, Scalar
from gradclip._src.core.formats import FLOAT32, FLOAT64, dtype_name
from gradclip._src.core.values import Array
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.public import record
from gradclip._src.thresholds.history import (
    AnyHistory,
    NormHistory,
    check_between,
    check_window,
    framework_like,
    namespace_of,
    norms_kept,
    of_framework,
    of_one_norm,
)
from gradclip._src.words import with_advice


@record
class FollowingRule:
    """A rule that computes a threshold from the norms of past steps.

    Attributes: the fields, as each rule documents them.

    """

    _instead_of_threshold: ClassVar[str] = (
        "It is a rule: pass rule.max_norm(history), or a gradclip.AdaptiveThreshold(rule) to gradclip.clip_grad_norm_ "
        "or clip_grad_layer_norm_."
    )

    _least_share: ClassVar[float] = 1.0
    """The smallest threshold, divided by `factor` and the quantile."""

    _most_share: ClassVar[float] = 1.0
    """The largest threshold, divided by `factor` and the quantile."""

    _below_usual: ClassVar[bool] = False
    """Whether the threshold may be far below the usual norm, so that a norm above it says nothing."""

    _arrays: ClassVar[int] = 2
    """How many arrays a history holds."""

    factor: float
    quantile: float
    window: int
    initial: float
    lower: float
    upper: float
    _fraction: tuple[int, int]
    _kept: dict[str, tuple[float, ...]]
    _bounds: dict[str, tuple[float, ...]]

    @with_subnormals
    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "_kept": {},
            "_bounds": {},
            "factor": check_between("factor", self.factor, 2.0**-64, 2.0**64),
            "quantile": check_between("quantile", self.quantile, 0.0, 1.0),
            "window": check_window("window", self.window),
            **{name: check_between(name, getattr(self, name), 0.0, math.inf) for name in ("initial", "lower", "upper")},
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_fraction", fraction_of(self.quantile, self.window))
        bounds = (self.initial, self.lower, self.upper)
        for form in (FLOAT32, FLOAT64):
            self._kept[form.name] = norms_kept(self.factor * self._least_share, self.factor * self._most_share, form)
            self._bounds[form.name] = tuple(map(form.toward_zero, bounds))
        if self.lower > self.upper:
            raise ValueError(f"lower must not be above upper, got lower={self.lower!r} and upper={self.upper!r}.")

    @property
    def recovery_steps(self) -> int:
        """K: after this many finite positive norms at one level, the threshold has reached it, whatever came before.

        >>> import gradclip
        >>> gradclip.QuantileRule().recovery_steps
        65
        """
        return recovery_steps(self._fraction, self.window)

    @with_advice
    def init(self, like: HasDtype | None = None, shape: tuple[int, ...] = ()) -> AnyHistory:
        """Return an empty history.

        Args:
            like: an array with the framework and device of the norms. The history is float64 if this array is, else
                float32. None means NumPy and float32.
            shape: () for one norm at each step, (layers,) for one norm and one threshold per layer.

        """
        like = np.zeros((), np.float32) if like is None else like
        framework, xp = framework_like(like), namespace_of(like)
        zeros = framework.zeros(shape, like)
        dtype = zeros.dtype if dtype_name(zeros) == "float64" else xp.float32
        norms = xp.astype(framework.zeros((*shape, self.window), like), dtype)
        return NormHistory(xp.full_like(norms, math.inf), xp.astype(zeros, int))

    @with_subnormals
    def max_norm(self, history: AnyHistory) -> Scalar:
        """Return the threshold for the next step, a scalar of the history's framework and dtype, or one per layer.

        It depends only on norms observed so far, and does not wait for the device. Raises ValueError for a history with
        a different window, as `observe` does.
        """
        norms, count = self._own(history)
        if of_one_norm(norms):
            return self._number(norms, int(count))
        xp = namespace_of(norms)
        smallest = partial(_smallest, _ordered(norms, count), count[..., None])
        # Keep one axis until the end: NumPy 1 would convert the product of a scalar to float64.
        found = self._of(smallest, self.factor, lambda x, least: xp.clip(x, least, math.inf))
        return self._within(norms, count[..., None], found)[..., 0]

    def _within(self, norms: Array, count: Array, found: Array) -> Any:
        """Return `initial` where nothing is counted, else what was found, limited to [lower, upper]."""
        xp = namespace_of(norms)
        initial, lower, upper = self._bounds[dtype_name(norms)]
        return xp.clip(xp.where(count > 0, found, initial), lower, upper)

    def _number(self, norms: np.ndarray, count: int) -> np.floating[Any]:
        """Compute `max_norm` for one norm at each step in NumPy arrays, with fewer operations."""
        as_held, found = norms.dtype.type, None
        if count:
            smallest = partial(_smallest_number, norms, count)
            found = self._of(smallest, as_held(self.factor), lambda x, least: max(x, as_held(least)))
        return self._number_within(as_held, count, found)

    def _number_within(self, as_held: Any, count: int, found: Any) -> np.floating[Any]:
        """Compute `_within` for one number."""
        # Compare types: looking up the name of a NumPy dtype is slow.
        initial, lower, upper = map(as_held, self._bounds[FLOAT64.name if as_held is np.float64 else FLOAT32.name])
        return min(max(found if count else initial, lower), upper)

    def _of(
        self, smallest: Callable[[tuple[int, int]], Any], factor: Scalar, at_least: Callable[[Any, float], Any]
    ) -> Any:
        """Compute the threshold from the quantiles that `smallest` finds; `at_least` raises a number to another."""
        raise NotImplementedError

    @with_subnormals
    def observe(self, history: AnyHistory, norm: Scalar | Sequence[Scalar]) -> AnyHistory:
        """Add the norm before clipping to the history and return the new history. Only a finite positive norm is kept.

        Args:
            history: the history from `init` or an earlier call.
            norm: a scalar, as `gradclip.clip_by_global_norm` returns it. Its derivative is dropped. For layers, an
                array with the shape of `count`, or a list of scalars, as `gradclip.clip_by_layer_norm` returns it for a
                list.

        """
        norms, count = self._own(history)
        xp, (least, most) = namespace_of(norms), self._kept[dtype_name(norms)]
        if of_one_norm(norms) and isinstance(norm, float | np.floating):
            if not least <= float(norm) <= most:
                return history
            return NormHistory(
                np.concatenate([[norms.dtype.type(norm)], norms[:-1]]), np.minimum(count + 1, self.window)
            )
        norm = of_framework(norms, norm)
        kept = (norm >= least) & (norm <= most)
        # Select before converting: NumPy warns about numbers that float32 cannot hold.
        last = xp.astype(xp.where(kept, norm, least), norms.dtype)
        if last.shape != count.shape:  # one norm for all layers
            last = xp.broadcast_to(last, count.shape)
        shifted = xp.concat([last[..., None], norms[..., :-1]], axis=-1)
        more = count + xp.astype(kept, count.dtype)
        return NormHistory(xp.where(kept[..., None], shifted, norms), xp.clip(more, 0, self.window))

    def _quantile_number(self, norms: np.ndarray, count: int) -> np.floating[Any]:
        return _smallest_number(norms, count, self._fraction)

    def _quantile_array(self, norms: Array, count: Array) -> Any:
        return _smallest(_ordered(norms, count), count[..., None], self._fraction)

    def _own(self, history: AnyHistory) -> tuple[Any, Any]:
        if len(history) != self._arrays:
            raise ValueError(
                f"the history has {len(history)} arrays, but those of a {type(self).__name__} have {self._arrays}. "
                "Pass a history from its own init."
            )
        norms, count = history[:2]
        if norms.shape[-1] != self.window:
            raise ValueError(
                f"the history holds {norms.shape[-1]} norms, but this rule's window is {self.window}. Pass a history "
                "from its own init."
            )
        return norms, count


@lru_cache(maxsize=64)
def fraction_of(quantile: float, window: int) -> tuple[int, int]:
    """Return the smallest fraction n / d >= quantile with d <= window. It gives the same k for every c <= window.

    That is, ceil(quantile * c) = ceil(n * c / d). Proof: if ceil(quantile * c) = m, then m / c >= quantile is one of
    these fractions, so n / d <= m / c.
    """
    exact = Fraction(repr(quantile))
    found = min(Fraction(math.ceil(exact * c), c) for c in range(1, window + 1))
    return found.numerator, found.denominator


def recovery_steps(fraction: tuple[int, int], window: int) -> int:
    """Return K: a quantile of a window is within [a, b] once K norms within [a, b] have been observed."""
    k = max(1, _place(fraction, window))
    return max(k, window - k + 1)


def _place(fraction: tuple[int, int], count: Any) -> Any:
    """Return k: the quantile of `count` norms is the k-th smallest; 0 without norms."""
    numerator, denominator = fraction
    return (count * numerator + (denominator - 1)) // denominator


def _ordered(norms: Array, count: Array) -> Array:
    """Return the norms in rising order; ones in rows without norms."""
    xp = namespace_of(norms)
    return xp.where(count[..., None] > 0, xp.sort(norms, axis=-1), 1.0)


def _smallest(ordered: Array, count: Any, fraction: tuple[int, int]) -> Any:
    """Return the quantile of each row of ordered norms."""
    xp, (numerator, denominator) = namespace_of(ordered), fraction
    # The place k of the smallest, counted from 0: ceil(count * fraction) - 1.
    at = xp.clip((count * numerator - 1) // denominator, 0, ordered.shape[-1] - 1)
    # One row is read by its places alone, which takes PyTorch one operation and not six.
    return xp.take(ordered, at, axis=-1) if ordered.ndim == 1 else xp.take_along_axis(ordered, at, axis=-1)


def _smallest_number(norms: np.ndarray, count: int, fraction: tuple[int, int]) -> np.floating[Any]:
    """Compute `_smallest` for one norm at each step in NumPy arrays, which needs no sort."""
    at = max(1, _place(fraction, count)) - 1
    return np.partition(norms, at)[at]
