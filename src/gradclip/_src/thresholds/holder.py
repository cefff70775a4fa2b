"""`AdaptiveThreshold`: adaptive thresholds for loops that clip in place. It holds a rule and its history."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any

import numpy as np

from gradclip._src.annotations import Ord, Scalar, Threshold
from gradclip._src.backends.registry import entry_of, find, framework_of
from gradclip._src.core.formats import dtype_name
from gradclip._src.core.nonfinite import PROPAGATE, Nonfinite
from gradclip._src.core.norms import Order
from gradclip._src.core.rules import Seen
from gradclip._src.public import public
from gradclip._src.thresholds.below_usual import SteadyRule, rule_given
from gradclip._src.thresholds.following import FollowingRule
from gradclip._src.thresholds.history import (
    AnyHistory,
    check_between,
    namespace_of,
    of_one_norm,
    other_kind,
    places_of,
)
from gradclip._src.words import shown, typed, with_advice

_KEYS = ("ord", "dtype", "norms", "steps", "num_clipped", "num_skipped", "norm", "max_norm")
_MORE = ("held", "layers")
"""Keys that only some states have."""


@public
class AdaptiveThreshold:
    """A threshold that follows the norms. Pass it as `max_norm` of `gradclip.clip_grad_norm_` at every step.

    Passed to `gradclip.clip_grad_layer_norm_`, or to `gradclip.clip_at_step` with `scope="layer"`, each layer has a
    threshold of its own: rule(norms of that layer before this step), with one rule for all.

    Each call clips to a threshold computed from the earlier steps, then observes its own norm before clipping. A call
    that raises observes nothing, unless it has clipped: the callback of a monitor may raise after that.
    `gradclip.SpreadRule`, `gradclip.SteadyRule` and `gradclip.QuantileRule` have the formulas, and the
    proofs that the threshold recovers after any history.

    Args:
        rule: a `gradclip.SpreadRule`, the default, which also tames steps that are usually too long; a
            `gradclip.SteadyRule`, for Adam; or a `gradclip.QuantileRule`, which limits spikes only and is the
            default with `skip_above`.
        skip_above: skip a step if its norm is more than `skip_above` times the threshold: its gradients become zeros.
            At least 1; `inf` skips none. It needs a `gradclip.QuantileRule`. The norm of a skipped step is still
            observed, so a level that lasts is accepted. With `gradclip.clip_at_step`, optimizers with
            `fused=True` really skip the step: their moments and step count do not change.

    Attributes:
        rule: the rule.
        norm: the norm before clipping at the last step, as the call returned it; None before the first step.
        max_norm: the threshold of the last step, a number, or on an accelerator a scalar array; None before the first.

    Layers are known by their names, else by their places, and by their shapes. The parts of names that `torch.compile`
    and DDP add do not count. A new layer begins a history of its own. A layer that is missing is an error.
    Layers without names must keep their order: if two of one shape change places, each gets the history of the other.
    Only parameter groups may get new ones, at the end of a group or in a last group.

    A layer that has no gradient at a step, or a norm that is 0 or not finite, keeps its threshold. A norm beyond the
    range of its dtype counts as not finite. `norm`, `max_norm` and `next_max_norm` are then vectors, with 0 as the norm
    of a layer without a gradient. A step counts as skipped if a layer was, else as clipped if one was. If a gradient is
    float64, all thresholds are.

    If several processes hold parts of the gradients, make one `AdaptiveThreshold` in each. They see equal norms, so
    their thresholds are equal to the last bit. On an accelerator, nothing waits for the device until you read a value.

    Raises:
        TypeError: a `rule` of a different type, or a `skip_above` that is not a number.
        ValueError: `skip_above` is below 1 or NaN, or it comes with a rule that may be below the usual norm, or with
            layers.

    >>> import gradclip
    >>> import numpy as np
    >>> max_norm = AdaptiveThreshold()
    >>> for gradient in ([3.0, 4.0], [30.0, 40.0]):
    ...     update = {"w": np.array(gradient)}
    ...     norm = gradclip.clip_grad_norm_(update, max_norm)
    >>> # Clipped to the norm of the first step:
    >>> float(norm), update["w"].round(6).tolist()
    (50.0, [3.0, 4.0])
    >>> max_norm.num_clipped, max_norm.num_skipped
    (1, 0)
    >>> # By layer. The first has its usual norm, the second has not:
    >>> max_norm = AdaptiveThreshold()
    >>> for size in (1.0, 10.0):
    ...     update = [np.array([3.0, 4.0]), np.array([size])]
    ...     norms = gradclip.clip_grad_layer_norm_(update, max_norm)
    >>> [layer.round(6).tolist() for layer in update]
    [[3.0, 4.0], [1.0]]

    """

    _elsewhere = (
        "In an optax chain, use gradclip.integrations.optax.adaptive_clip_by_global_norm(). Elsewhere, use a rule. "
        "Before the first step: rule = gradclip.SpreadRule(), history = rule.init(like), where `like` is any "
        "array with the framework and device of the gradients. At every step:\n"
        "    clipped, norm = gradclip.clip_by_global_norm(tree, rule.max_norm(history))\n"
        "    history = rule.observe(history, norm)"
    )
    _instead_of_threshold = (
        f"Pass it to gradclip.clip_grad_norm_, clip_grad_layer_norm_ or gradclip.clip_at_step. {_elsewhere}"
    )

    @with_advice
    def __init__(self, rule: FollowingRule | None = None, *, skip_above: float = math.inf) -> None:
        self.skip_above = check_between("skip_above", skip_above, 1.0, math.inf)
        self.rule = rule_given(rule, skips=self.skip_above < math.inf)
        self.norm: Scalar | None = None
        self.max_norm: Scalar | None = None
        self._history = self.rule.init()
        self._order: Order | None = None
        self._layers: tuple[str, ...] | None = None
        self._counts: dict[str, Any] = {"steps": 0, "num_clipped": 0, "num_skipped": 0}

    def __repr__(self) -> str:
        skips = "" if math.isinf(self.skip_above) else f", skip_above={self.skip_above!r}"
        return f"AdaptiveThreshold({self.rule!r}{skips})"

    @property
    def next_max_norm(self) -> Scalar:
        """The threshold of the next step: a number, or on an accelerator a scalar array; of layers a vector."""
        threshold = self.rule.max_norm(self._history)
        return float(threshold) if of_one_norm(self._history.norms) else threshold

    @property
    def history(self) -> AnyHistory:
        """The last norms observed, newest first."""
        return self._history

    @property
    def steps(self) -> int:
        """The number of steps observed."""
        return int(self._counts["steps"])

    @property
    def num_clipped(self) -> int:
        """The number of steps clipped: the norm was above the threshold, and the step was not skipped."""
        return int(self._counts["num_clipped"])

    @property
    def num_skipped(self) -> int:
        """The number of steps skipped, by `skip_above` or by `nonfinite="drop"` and `"skip"`."""
        return int(self._counts["num_skipped"])

    @with_advice
    def observe(self, norm: Scalar, *, ord: Ord = 2) -> None:
        """Take note of a step that was clipped to `next_max_norm` by other means.

        >>> max_norm = AdaptiveThreshold()
        >>> for norm in (5.0, 50.0):
        ...     threshold = float(max_norm.next_max_norm)
        ...     coefficient = min(1.0, threshold / norm)  # for the gradients
        ...     max_norm.observe(norm)
        >>> coefficient, max_norm.num_clipped
        (0.1, 1)

        Args:
            norm: the norm before clipping, a number or a scalar array. On an accelerator nothing waits for it. A norm
                of more than `skip_above` times the threshold counts as skipped: then skip the step.
            ord: the order of the norm.

        Raises:
            TypeError: a norm that is not a number or a scalar array, or is traced by JAX. ValueError: a negative norm,
            an unknown order, or one other than that of earlier steps.

        """
        order = Order.parse(ord)
        threshold = self._for_order(order)
        checked = check_norm(norm)
        self._observe(checked, threshold, order, PROPAGATE, self._shown(checked, threshold))

    # Called by the clipping functions

    def _clip(
        self, clip_to: Callable[[Threshold], tuple[Scalar, Seen | None]], order: Order, nonfinite: Nonfinite
    ) -> Scalar:
        """Clip with a function from a threshold to the norm before clipping; observe that norm and return it.

        The function also says what the norm shows, unless the dtype of the norm is sure to hold it.
        """
        threshold = self._for_order(order)
        norm, beyond = clip_to(threshold)
        shown = self._shown(norm, threshold, beyond)
        if self.skip_above < math.inf:
            if _on_device(norm):
                xp = framework_of(norm).namespace  # type: ignore[union-attr]
                clip_to(xp.where(shown.spike, 0.0, xp.full_like(norm, math.inf)))
            elif shown.spike:
                clip_to(0.0)
        self._observe(norm, threshold, order, nonfinite, shown)
        return norm

    def _for_order(self, order: Order) -> Scalar:
        """Return the threshold of the next step. Raises like `check_order`."""
        self._check_order(order)
        return self.next_max_norm

    def _check_order(self, order: Order, layers: tuple[str, ...] | None = None) -> None:
        """Raise ValueError if earlier steps had norms of a different order, or of layers; None: one norm."""
        if self._order is not None and (self._layers is None) is not (layers is None):
            raise other_kind(self._layers, layers)
        if self._order not in (None, order):
            raise ValueError(
                f"this AdaptiveThreshold has observed norms of ord={self._order.p}, got ord={order.p}. Make one for "
                "each order."
            )

    def _observe(self, norm: Scalar, threshold: Scalar, order: Order, nonfinite: Nonfinite, shown: Seen) -> None:
        """Record a step that has succeeded: its norm before clipping and its threshold, and what the norm shows.

        Raises TypeError if the norm is traced by JAX: it has no value yet.
        """
        waits = _on_device(norm)
        if waits:
            _check_untraced(norm)
        value = norm if waits else float(norm)
        finite, above, skipped, final = shown
        if final and self.skip_above == math.inf:
            skipped = False  # known here: on a device it would take operations
        if nonfinite.blanks:
            skipped = skipped | (finite == 0)
        history = self.rule.observe(self._beside(norm, value), value)
        more = {"steps": 1, "num_clipped": above & (skipped == 0), "num_skipped": skipped}
        self._counts = {name: count + more[name] for name, count in self._counts.items()}
        self._order, self._history, self.norm = order, history, norm
        self.max_norm = threshold.item() if isinstance(threshold, np.ndarray | np.generic) else threshold

    def _for_layers(self, layers: tuple[str, ...], order: Order) -> Any:
        """Return the threshold of each layer for the next step, as a vector. Raises like `_check_order`."""
        self._check_takes_layers()
        self._check_order(order, layers)
        return self.rule.max_norm(self._history_of(layers))

    def _check_takes_layers(self) -> None:
        if self.skip_above < math.inf:
            raise ValueError(
                "skip_above skips a step by the norm of all gradients, but here each layer has its own. Leave it out: "
                "the layer that has a spike is clipped. To skip steps, call clip_grad_norm_, or clip_at_step with "
                "scope='global'."
            )

    def _history_of(self, layers: tuple[str, ...]) -> AnyHistory:
        """Return the history of each layer, empty for a new one. Raises like `places_of`."""
        known, history = self._layers, self._history
        if known is None or known == layers:
            return self.rule.init(shape=(len(layers),)) if known is None else history
        places, fresh = places_of(layers, known), self.rule.init(history.norms, (1,))
        pairs, xp = zip(history, fresh, strict=True), namespace_of(history.norms)
        rows = [[new[0] if place is None else old[place] for place in places] for old, new in pairs]
        return type(history)(*map(xp.stack, rows))

    def _observe_layers(
        self, layers: tuple[str, ...], norms: Sequence[Any], limits: Any, order: Order, nonfinite: Nonfinite
    ) -> None:
        """Record a step that has succeeded: the norms of layers, None for one without a gradient, and thresholds."""
        each = _vector(norms)
        waits = not isinstance(each, np.ndarray)
        if waits:
            _check_untraced(each)
        framework: Any = framework_of(each)
        xp, history = framework.namespace, self._history_of(layers)
        wide = "float64" in {dtype_name(history.norms), *(dtype_name(one) for one in norms if one is not None)}
        like = each if waits else np.zeros((), np.float64 if wide else np.float32)
        history = self.rule.observe(_as_of(history, like, wide), each)
        known = entry_of(limits) is entry_of(each)
        limits = framework.beside(limits, each) if known else framework.like(each, dtype_name(limits), _host(limits))
        finite = xp.isfinite(each)
        skipped = xp.any(~finite) if nonfinite.blanks else False
        clipped = xp.any(finite & (each > limits)) & (skipped == 0)
        more = {"steps": 1, "num_clipped": clipped, "num_skipped": skipped}
        self._counts = {name: count + more[name] for name, count in self._counts.items()}
        self._order, self._layers, self._history, self.norm, self.max_norm = order, layers, history, each, limits

    def _shown(self, norm: Scalar, threshold: Scalar, beyond: Seen | None = None) -> Seen:
        """Say what a norm shows; `beyond` is what a norm shows that its dtype may not hold."""
        if beyond is not None and beyond.final:
            return beyond
        if _on_device(norm):
            framework: Any = framework_of(norm)
            xp, finite = framework.namespace, framework.namespace.isfinite(norm)
            threshold = framework.beside(threshold, norm) if entry_of(threshold) is entry_of(norm) else threshold
            found = Seen(finite, (norm > threshold) & finite, (norm > threshold * self.skip_above) & finite)
            return found if beyond is None else Seen(*map(partial(xp.where, finite), found[:3], beyond))
        value, limit = float(norm), float(threshold)
        if math.isfinite(value):
            return Seen(True, limit < value, limit * self.skip_above < value)
        return beyond or Seen(False, False, False)

    def _beside(self, norm: Scalar, seen: Scalar) -> AnyHistory:
        """Move the history to the device of the norm (the host if its value is `seen`), in a dtype at least as wide."""
        wide = "float64" in (dtype_name(self._history.norms), dtype_name(norm))
        like = np.zeros((), np.float64 if wide else np.float32) if isinstance(seen, float) else norm
        return _as_of(self._history, like, wide)

    # Saving and loading

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_order": self._order and self._order.p}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update({"_layers": None, **state})
        self._order = None if state["_order"] is None else Order(state["_order"])

    @with_advice
    def state_dict(self) -> dict[str, Any]:
        """Return the state as Python numbers, which any checkpoint format can save. The rule is not included.

        `torch.load(..., weights_only=True)` can load it. On an accelerator, this call waits for the device.
        """
        kept = {name: np.asarray(_host(array)) for name, array in self._history._asdict().items()}
        rows = zip(np.atleast_2d(kept["norms"]), np.atleast_1d(kept["count"]), strict=True)
        norms, layers = [row[: int(count)].tolist() for row, count in rows], self._layers
        return {
            "ord": self._order and self._order.p,
            "dtype": kept["norms"].dtype.name,
            "norms": norms[0] if layers is None else norms,
            **{name: int(count) for name, count in self._counts.items()},
            "norm": None if self.norm is None else _plain(self.norm),
            "max_norm": None if self.max_norm is None else _plain(self.max_norm),
            **({"held": kept["held"].tolist()} if "held" in kept else {}),
            **({} if layers is None else {"layers": list(layers)}),
        }

    @with_advice
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state. The thresholds equal those of an uninterrupted run, to the last bit.

        If the state has a longer window, its newest norms are kept. Raises ValueError if the state's norms have a
        different order or of layers that were not observed here, or if it is not a state of an `AdaptiveThreshold`.
        """
        if {*state, *_MORE} != {*_KEYS, *_MORE}:
            raise ValueError(
                f"an AdaptiveThreshold's state has {', '.join(_KEYS)}; got {', '.join(map(str, state)) or 'nothing'}. "
                "Pass the result of its state_dict()."
            )
        _check_numbers(state)
        order = None if state["ord"] is None else Order(float(state["ord"]))  # PyTorch also has orders below 1
        if None not in (order, self._order) and order != self._order:
            raise ValueError(
                f"the state holds norms of ord={state['ord']}, but this AdaptiveThreshold has observed norms of "
                f"ord={self._order.p}. Load it into a new one, and clip with that ord."  # type: ignore[union-attr]
            )
        saved = None if state.get("layers") is None else tuple(state["layers"])
        layers = self._layers if order is None else saved
        if self._order is not None:
            self._check_order(self._order, layers)
            places_of(self._layers or (), layers or ())
        dtype = np.dtype(state["dtype"]).type
        history = self.rule.init(np.zeros((), dtype), () if layers is None else (len(layers),))
        for norm in reversed(state["norms"][: self.rule.window]) if layers is None else self._columns(state["norms"]):
            history = self.rule.observe(history, norm)
        if isinstance(self.rule, SteadyRule) and "held" in state:
            history = self.rule._holding(history, np.asarray(state["held"], dtype)[()])
        counts = {name: int(state[name]) for name in self._counts}
        self._order, self._history, self._counts = order or self._order, history, counts
        self._layers = layers
        self.norm, self.max_norm = (
            np.array(x) if isinstance(x, list) else x for x in (state["norm"], state["max_norm"])
        )

    def _columns(self, rows: Sequence[Sequence[float]]) -> np.ndarray:
        """Return the norms of layers, newest first, as a vector for each step, oldest first; 0 where there is none."""
        kept = [list(row[: self.rule.window]) for row in rows]
        longest = max(map(len, kept), default=0)
        return np.array([[0.0] * (longest - len(row)) + row[::-1] for row in kept]).reshape(len(kept), longest).T


def _check_numbers(state: Mapping[str, Any]) -> None:
    """Raise a ValueError for numbers that no history has: the thresholds computed from them would be none."""
    try:
        layers = state.get("layers")
        kept = [name for name in ("norms", "held") if name in state]
        each = {name: [state[name]] if layers is None else list(state[name]) for name in kept}
        wrong = [norm for norms in each["norms"] for norm in norms if not 0 < float(norm) < math.inf]
        wrong += [held for held in each.get("held", ()) if not 0 <= float(held) < math.inf]
        wrong += [name for name in (state["dtype"],) if name not in ("float32", "float64")]
        wrong += [ord for ord in (state["ord"],) if ord is not None and not (float(ord) > 0 or ord == -math.inf)]
        counts = [state[name] for name in ("steps", "num_clipped", "num_skipped")]
        wrong += [count for count in counts if not count >= 0 or int(count) != count]
        last = [one for name in ("norm", "max_norm") for one in ([state[name]] if layers is None else state[name])]
        wrong += [one for one in last if one is not None and (isinstance(one, str) or float(one) < 0)]
        wrong += [norms for norms in each["norms"] if isinstance(norms, str | Mapping | Set)]
        wrong += [] if layers is None else [one for one in layers if not isinstance(one, str)]
        vectors = [] if layers is None else [*each.values(), state["norm"], state["max_norm"]]
        wrong += [] if layers is None or {*map(len, vectors)} == {len(layers)} else [layers]
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"the state is damaged: {error}. Pass the result of its state_dict().") from error
    if wrong:
        raise ValueError(f"the state is damaged: it holds {shown(wrong[0])}. Pass the result of its state_dict().")


def check_norm(norm: Scalar) -> Scalar:
    """Return a norm. Raises TypeError for what is neither a number nor a scalar, ValueError for a negative number."""
    array = framework_of(norm)
    if array is None and (isinstance(norm, bool) or not isinstance(norm, numbers.Real)):
        raise TypeError(f"norm must be a number or a scalar array, got {typed(norm)}. Pass the norm before clipping.")
    if array is not None and tuple(norm.shape) != ():
        raise TypeError(
            f"norm must be a scalar, got shape {tuple(norm.shape)}. Pass the norm of all gradients together."
        )
    if not _on_device(norm) and float(norm) < 0:
        raise ValueError(f"norm must not be negative, got {float(norm)!r}.")
    return norm if array is not None else np.float64(norm)


def _on_device(norm: Scalar) -> bool:
    """Say whether reading a norm would wait for the device, or is impossible."""
    framework = None if isinstance(norm, float) else framework_of(norm)
    if framework is None or framework.on_fast_path([norm]) is not None:  # quicker to ask than the backend
        return False
    return not find([norm], lambda: ["norm"]).concrete


def _check_untraced(norm: Scalar) -> None:
    if framework_of(norm).is_traced(norm):  # type: ignore[union-attr]
        raise TypeError(
            "the norm is traced: it has no value yet for an AdaptiveThreshold to keep. Call it outside jit "
            "or mx.compile. " + AdaptiveThreshold._elsewhere
        )


def _as_of(history: AnyHistory, like: Scalar, wide: bool) -> AnyHistory:
    """Move a history to the framework and device of an array, in float64 if `wide`, else float32."""
    name = "float64" if wide else "float32"
    framework: Any = framework_of(like)
    if entry_of(history.norms) is entry_of(like):
        wider = (x if dtype_name(x) == name else _astype(x, name) for x in (history.norms, *history[2:]))
        norms, *held = (framework.beside(x, like) for x in wider)
        return type(history)(norms, framework.beside(history.count, like), *held)
    norms, *held = (framework.like(like, name, _host(x)) for x in (history.norms, *history[2:]))
    counts = framework.like(like, "float32", np.float32(_host(history.count)))
    return type(history)(norms, framework.namespace.astype(counts, int), *held)


def _astype(array: Scalar, name: str) -> Any:
    xp = framework_of(array).namespace  # type: ignore[union-attr]
    return xp.astype(array, getattr(xp, name))


def _vector(norms: Sequence[Any]) -> Any:
    """Return the norms of layers as a vector, in host memory in float64; 0 for a layer without a gradient."""
    some = [norm for norm in norms if norm is not None]
    if not some or not _on_device(some[0]):
        return np.array([0.0 if norm is None else float(norm) for norm in norms])
    framework: Any = framework_of(some[0])
    zero = framework.namespace.zeros_like(some[0])
    return framework.namespace.stack([zero if one is None else framework.beside(one, some[0]) for one in norms])


def _plain(norm: Scalar) -> Any:
    """Return a norm as a number, or those of layers as a list."""
    return np.asarray(_host(norm), np.float64).tolist() if getattr(norm, "shape", ()) else float(norm)


def _host(array: object) -> np.ndarray:
    framework: Any = framework_of(array)
    return framework.on_host(array).data
