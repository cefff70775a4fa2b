"""Keras 3 optimizers that clip with gradclip, on the JAX, PyTorch and TensorFlow backends.

`clipped(keras.optimizers.Adam)` is an optimizer class that takes the arguments of Adam, plus `max_norm`. What differs
from Keras' `global_clipnorm`, `clipnorm` and `clipvalue`:

- The bounds hold exactly, and norms do not overflow.
- You can read the norm and the share of clipped steps.
- Under `tf.distribute`, the sum over replicas is clipped, not each replica's part.
- The threshold may follow the norms, or a schedule.
"""

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

import numpy as np

from gradclip._src.annotations import Policy, Scalar, Threshold
from gradclip._src.backends.imported import needed_for
from gradclip._src.core.formats import FLOAT32, FLOAT64
from gradclip._src.core.nonfinite import OUTSIDE, Nonfinite
from gradclip._src.functional.clip import clip_by_global_norm, clip_by_layer_norm, clip_by_value, global_norm
from gradclip._src.passed.arguments import check_threshold
from gradclip._src.thresholds.below_usual import SpreadRule, SteadyRule
from gradclip._src.thresholds.following import FollowingRule
from gradclip._src.thresholds.holder import AdaptiveThreshold
from gradclip._src.thresholds.quantile import QuantileRule
from gradclip._src.words import shown, typed, with_advice

with needed_for("keras", "keras"):
    import keras
    from keras import ops

__all__ = ["ClippingMetrics", "clipped"]

Scope: TypeAlias = Literal["global", "variable", "value"]
Optimizer = TypeVar("Optimizer", bound="keras.optimizers.Optimizer")
Schedule: TypeAlias = Callable[[Any], Threshold]
RULES: dict[str, type[FollowingRule]] = {rule.__name__: rule for rule in (QuantileRule, SpreadRule, SteadyRule)}
_EAGERLY = "Compile the model with run_eagerly=True, or pass nonfinite='drop' and read last_norm."
OF_KERAS = ("clipnorm", "global_clipnorm", "clipvalue")


@with_advice
def clipped(optimizer: type[Optimizer]) -> Callable[..., Optimizer]:
    """Return a subclass of a Keras optimizer class that clips gradients before each update.

    The same optimizer class always gives the same subclass. It takes three additional keyword arguments:

    - `max_norm`: the threshold, in the units of the gradients: a number >= 0; a schedule, which is a function of the
      step or one of `keras.optimizers.schedules`; or one that follows the norms, which is a `gradclip.SpreadRule`,
      `SteadyRule`, `QuantileRule` or `AdaptiveThreshold`.
    - `scope`: what to clip: "global" (all variables by their global norm), "variable" (each variable by its own norm)
      or "value" (each element by its magnitude).
    - `nonfinite`: what to do with NaN and infinities, as in `gradclip.clip_by_global_norm`. Not with the scope "value".

    The optimizer clips the final gradients of an update: summed over all replicas under `tf.distribute`, averaged over
    accumulation steps, and divided by the loss scale.

    `last_norm` is the norm of the gradients before clipping, at the last update: with "variable" the largest norm of a
    variable (under "drop" of those without NaN), with "value" the largest magnitude. `clipped_share` is the share of
    updates so far with a norm above `max_norm`. Both are scalar tensors, stored in variables of the optimizer.

    A threshold that follows the norms is that of `gradclip.AdaptiveThreshold`, whose `skip_above` makes the gradients
    zeros. With "variable" each variable has a threshold of its own, and needs a gradient at each update. The norms are
    kept in variables of the optimizer, made when it is built, and an `AdaptiveThreshold` that you pass stays empty. A
    schedule is given the step that Keras gives to schedules of the learning rate. In compiled steps, a negative number
    that it computes counts as 0, and NaN makes all gradients NaN. `last_max_norm` is the threshold at the last update,
    one for each variable if they have their own. A number is a variable too: `optimizer.max_norm = 0.5` takes effect at
    the next update, and is saved. In float32 it is rounded toward zero.

    The subclass is registered for saving. To load a saved optimizer, import this module first. For an optimizer that is
    not part of Keras, also call `clipped` with its class. An optimizer that is pickled or copied alone keeps all of its
    variables, for when it is built again.

    Raises:
        TypeError: `optimizer` is not a class of Keras optimizers, or is a wrapper that passes gradients on to others.
        ValueError: raised when you create an optimizer: an unknown scope or policy, a negative or NaN threshold, an
        `AdaptiveThreshold` that has observed norms, or Keras' own `clipnorm`, `global_clipnorm` or `clipvalue` in
        addition to `max_norm`. At an update that is not compiled: a schedule computes a negative number or NaN.

    >>> optimizer = clipped(keras.optimizers.SGD)(learning_rate=1.0, max_norm=1.0)
    >>> weights = keras.Variable([0.0, 0.0])
    >>> optimizer.apply([ops.array([3.0, 4.0])], [weights])
    >>> norm, share = optimizer.last_norm, optimizer.clipped_share
    >>> [round(float(x), 4) for x in weights.numpy()], float(norm), float(share)
    ([-0.6, -0.8], 5.0, 1.0)
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, keras.optimizers.Optimizer)):
        raise TypeError(
            f"clipped takes a class of Keras optimizers, got {shown(optimizer)}. For example: "
            "clipped(keras.optimizers.Adam)(learning_rate=0.001, max_norm=1.0)."
        )
    if issubclass(optimizer, WRAPPERS):
        raise TypeError(
            f"{optimizer.__name__} passes gradients on to other optimizers, which must do the clipping. For example: "
            f"{optimizer.__name__}(clipped(keras.optimizers.Adam)(max_norm=1.0))."
        )
    if issubclass(optimizer, _Clipping):
        return optimizer
    # On PyTorch, Keras instantiates a different class, which updates all variables at once.
    return _subclass(keras.optimizers.Optimizer.__new__(optimizer).__class__)


class ClippingMetrics(keras.callbacks.Callback):
    """A callback that adds `grad_norm` and `clipped_share` to the logs of each epoch.

    `grad_norm` is the norm of the gradients before clipping, at the epoch's last update. `clipped_share` is the share
    of the epoch's updates that were clipped. If the threshold changes and all variables share it, `max_norm` is the
    threshold at the epoch's last update. In the list of callbacks, put this callback before those that read the
    logs, such as `keras.callbacks.CSVLogger`. Nothing is copied from the device before the epoch ends.

    Raises:
        TypeError: the model's optimizer was not made with `clipped`.
    """

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._before = _clipping_of(self.model.optimizer).counts()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        optimizer = _clipping_of(self.model.optimizer)
        clipped_steps, steps = (now - then for now, then in zip(optimizer.counts(), self._before, strict=True))
        if logs is not None:
            logs["grad_norm"] = float(optimizer.last_norm)
            logs["clipped_share"] = clipped_steps / max(steps, 1)
            threshold = optimizer.last_max_norm
            if _changes(optimizer._max_norm) and not len(threshold.shape):
                logs["max_norm"] = float(threshold)


class _Clipping(keras.optimizers.Optimizer):
    """A mixin for optimizer classes: it adds the arguments of `clipped`, and clips just before the update."""

    _max_norm: float | FollowingRule | AdaptiveThreshold | Schedule

    def __init__(
        self,
        *args: object,
        max_norm: float | FollowingRule | AdaptiveThreshold | Schedule,
        scope: Scope = "global",
        nonfinite: Policy = "propagate",
        **kwargs: object,
    ) -> None:
        threshold = _checked(max_norm)
        _check(scope, nonfinite)
        super().__init__(*args, **kwargs)
        given = {name: getattr(self, name) for name in OF_KERAS if getattr(self, name) is not None}
        if given:
            raise ValueError(
                f"max_norm and Keras' own {', '.join(f'{name}={value}' for name, value in given.items())} both clip. "
                "Pass only max_norm, with scope='variable' in place of clipnorm or scope='value' in place of clipvalue."
            )
        self.max_norm, self.scope, self.nonfinite = threshold, scope, nonfinite
        self._pickled: tuple[np.ndarray, ...] = ()
        self._norm = self.add_variable((), dtype="float32", aggregation="only_first_replica", name="last_norm")
        self._clipped_steps = self.add_variable((), dtype="int", aggregation="only_first_replica", name="clipped_steps")

    def build(self, variables: Sequence[Any]) -> None:
        if self.built:
            return
        before = len(self.variables)
        super().build(variables)
        # As tensors: JAX may hold variables that ask for float64 in float32.
        wide = "float64" in [keras.backend.standardize_dtype(ops.convert_to_tensor(x).dtype) for x in variables]
        dtype, rule = np.float64 if wide else np.float32, _rule(self._max_norm)
        if not _changes(self._max_norm):
            # Not of the shape of a schedule's: weights that were saved with a schedule must not be taken for it.
            self._last_max_norm = self._same_everywhere(_held(self._max_norm, dtype), "max_norm")
        else:
            own = self.scope == "variable" and rule is not None
            like = np.zeros(len(_with_gradients(variables)) if own else (), dtype)
            self._last_max_norm = self._same_everywhere(like, "last_max_norm")
            if rule:
                empty = rule.init(like, like.shape)
                self._history = [*map(self._same_everywhere, empty, empty._fields)]
        if self._pickled:
            self._restore(before)

    def _restore(self, before: int) -> None:
        """Give the variables that were made by `build` the values of the optimizer that was pickled."""
        shapes, own = [value.shape for value in self._pickled], [tuple(each.shape) for each in self.variables]
        if shapes != own:
            raise ValueError(
                f"the optimizer was pickled with variables of the shapes {shapes}, but is built with {own}. Build it "
                "for the variables of the same model, or make a new one."
            )
        # What existed before, and a number, users may have set in between.
        end = None if _changes(self._max_norm) else -1
        for variable, value in zip(self.variables[before:end], self._pickled[before:end], strict=True):
            variable.assign(value)
        self._pickled = ()

    def _same_everywhere(self, full: Any, name: str) -> Any:
        """Return a new variable, equal on all replicas, filled with the one number that an array holds."""
        # PyTorch indexes by int64, which JAX does not have by default.
        whole = "int64" if keras.backend.backend() == "torch" else "int"
        dtype = whole if full.dtype.kind == "i" else full.dtype.name
        start = keras.initializers.Constant(full.max(initial=0))  # 0 where no variable is trained
        return self.add_variable(full.shape, start, dtype, aggregation="only_first_replica", name=name)

    @property
    def max_norm(self) -> float | FollowingRule | AdaptiveThreshold | Schedule:
        """The threshold, or what makes one. A number may be set to another, also for steps that are compiled."""
        if _changes(self._max_norm) or not self.built:
            return self._max_norm
        held = ops.convert_to_numpy(self._last_max_norm)
        return self._max_norm if held == _held(self._max_norm, held.dtype) else float(held[0])

    @max_norm.setter
    def max_norm(self, max_norm: float | FollowingRule | AdaptiveThreshold | Schedule) -> None:
        threshold = _checked(max_norm)
        if self.built:
            if _changes(threshold) or _changes(self._max_norm):
                raise ValueError(
                    "max_norm of an optimizer that is built can only be set from a number to a number, got "
                    f"{shown(threshold)}. Make a new optimizer, and compile the model with it."
                )
            self._last_max_norm.assign(_held(threshold, np.dtype(self._last_max_norm.dtype)))
        self._max_norm = threshold

    @property
    def last_norm(self) -> Scalar:
        """The norm of the gradients before clipping, at the last update; 0 before the first update."""
        return ops.copy(self._norm)

    @property
    def clipped_share(self) -> Scalar:
        """The share of updates clipped so far, or 0 before the first update."""
        return ops.divide(ops.cast(self._clipped_steps, "float32"), ops.maximum(self.iterations, 1))

    @property
    def last_max_norm(self) -> Scalar:
        """The threshold at the last update; 0 before the first update, unless it is a number."""
        if not _changes(self._max_norm):
            return self._next_max_norm() if self.built else ops.convert_to_tensor(self._max_norm)
        return ops.copy(self._last_max_norm) if self.built else ops.zeros(())

    def counts(self) -> tuple[int, int]:
        """Return the number of clipped updates and the number of all updates."""
        return int(ops.copy(self._clipped_steps)), int(ops.copy(self.iterations))

    def get_config(self) -> dict[str, Any]:
        settings = {"max_norm": _configuration(self.max_norm), "scope": self.scope, "nonfinite": self.nonfinite}
        return super().get_config() | settings

    def __reduce__(self) -> tuple[Any, ...]:
        values = self._pickled or tuple(map(ops.convert_to_numpy, self.variables))
        # Unpickling calls a function of this module, so the process imports it and knows the class.
        cls = next(cls for cls in type(self).__mro__ if cls.__module__ != __name__)
        return _unpickled, (cls, keras.saving.serialize_keras_object(self), values)

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        names, last = list(store.keys()), str(len(self.variables) - 1)
        if self.built and not _changes(self._max_norm) and len(names) == int(last):
            # A file that has the number in the configuration only.
            store = {name: store[name] for name in names} | {last: self._last_max_norm}
        super().load_own_variables(store)

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> "_Clipping":
        scope = () if custom_objects is None else (custom_objects,)
        given = {name: _configured(x, *scope) if name == "max_norm" else x for name, x in config.items()}
        return super().from_config(given, *scope)

    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        own = self.scope == "variable" and _rule(self._max_norm) is not None
        needed = _with_gradients(self._trainable_variables)
        if own and [*map(self._get_variable_index, trainable_variables)] != needed:
            raise ValueError(
                f"scope='variable' with a max_norm that follows the norms needs a gradient for each of the "
                f"{len(needed)} variables at each update, in their order, got "
                f"{len(trainable_variables)}. Build the optimizer with those that have gradients, or pass a number."
            )
        super()._backend_apply_gradients(grads, trainable_variables)

    def _clip_gradients(self, grads: Sequence[Any]) -> list[Any]:
        threshold = self._next_max_norm()
        try:
            results, norms = SCOPES[self.scope](list(grads), threshold, self.nonfinite)
        except ValueError as error:
            if OUTSIDE not in str(error):
                raise
            raise ValueError(str(error).replace(OUTSIDE, _EAGERLY)) from None
        self._norm.assign(_largest(norms, self.nonfinite))
        self._clipped_steps.assign_add(ops.cast(ops.any(ops.greater(norms, threshold)), self._clipped_steps.dtype))
        if _changes(self._max_norm):
            self._last_max_norm.assign(threshold)
        if rule := _rule(self._max_norm):
            for kept, seen in zip(self._history, rule.observe(self._history_now(), norms), strict=True):
                kept.assign(seen)
        most = getattr(self._max_norm, "skip_above", math.inf)
        if most < math.inf:
            limit = ops.where(ops.greater(norms, threshold * most), 0.0, math.inf)
            results, _ = SCOPES[self.scope](results, limit, "propagate")
        return results

    def _next_max_norm(self) -> Any:
        if not _changes(self._max_norm):
            return ops.copy(self._last_max_norm)[0]
        if rule := _rule(self._max_norm):
            return rule.max_norm(self._history_now())
        found = cast("Schedule", self._max_norm)(ops.copy(self._iterations))
        if isinstance(found, numbers.Real):
            return found
        threshold = None if found is None else ops.copy(found)
        if threshold is None or len(threshold.shape):
            raise TypeError(f"max_norm must be one number at each step, but the schedule returned {typed(found)}.")
        return threshold

    def _history_now(self) -> Any:
        return tuple(map(ops.copy, self._history))


class _ClippingSums(_Clipping):
    """The mixin for TensorFlow: it clips after the replicas' gradients are summed."""

    def _clip_gradients(self, grads: Sequence[Any]) -> list[Any]:
        return list(grads)

    def _restore(self, before: int) -> None:
        import tensorflow as tf

        with tf.init_scope():  # a graph may be recorded
            super()._restore(before)

    def _all_reduce_sum_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        grads, variables = zip(*super()._all_reduce_sum_gradients(grads_and_vars), strict=True)
        return list(zip(super()._clip_gradients(grads), variables, strict=True))


@cache
def _subclass(optimizer: Any) -> Any:
    hooks = _ClippingSums if keras.backend.backend() == "tensorflow" else _Clipping
    members = {"__module__": __name__, "__doc__": f"{optimizer.__name__} that clips: see `clipped`."}
    made = type(f"Clipped{optimizer.__name__}", (hooks, optimizer), members)
    name = keras.saving.get_registered_name(optimizer)
    if ">" not in name and not optimizer.__module__.startswith("keras."):
        name = f"Custom>{name}"
    return keras.saving.register_keras_serializable("gradclip", name)(made)


def _unpickled(
    optimizer: type[keras.optimizers.Optimizer], config: dict[str, object], values: tuple[np.ndarray, ...]
) -> Any:
    clipped(optimizer)
    made = keras.saving.deserialize_keras_object(config, safe_mode=False)
    # The first exist; the others are made when it is built.
    for variable, value in zip(made.variables, values, strict=False):
        variable.assign(value)
    made._pickled = values if len(values) > len(made.variables) else ()
    return made


def _checked(max_norm: Any) -> float | FollowingRule | AdaptiveThreshold | Schedule:
    """Return a threshold as the optimizer keeps it."""
    if isinstance(max_norm, type):
        raise TypeError(f"max_norm must be a threshold, got the class {max_norm.__name__}. Pass {max_norm.__name__}().")
    rule = _rule(max_norm)
    if rule is not None and type(rule) not in RULES.values():
        raise TypeError(f"max_norm must be a {', '.join(RULES)}, a number or a schedule, got {typed(rule)}.")
    if isinstance(max_norm, AdaptiveThreshold) and max_norm.steps:
        raise ValueError(
            f"max_norm is an AdaptiveThreshold that has observed {max_norm.steps} norms, but the optimizer keeps its "
            "own. Pass a new one, or its rule."
        )
    return max_norm if _changes(max_norm) else float(check_threshold(max_norm))


def _rule(max_norm: object) -> FollowingRule | None:
    """Return the rule of a threshold that follows the norms."""
    rule = max_norm.rule if isinstance(max_norm, AdaptiveThreshold) else max_norm
    return rule if isinstance(rule, FollowingRule) else None


def _changes(max_norm: object) -> bool:
    return _rule(max_norm) is not None or callable(max_norm)


def _held(max_norm: Any, dtype: str | np.dtype | type) -> np.ndarray:
    """Return a number as the optimizer's variable holds it."""
    form = FLOAT64 if dtype == np.float64 else FLOAT32
    return np.array([form.toward_zero(max_norm)], dtype)


def _with_gradients(variables: Sequence[Any]) -> list[int]:
    """Return the places of the variables that are not, like the scales of float8 layers, overwritten by Keras."""
    return [at for at, each in enumerate(variables) if not getattr(each, "overwrite_with_gradient", False)]


def _configuration(max_norm: object) -> Any:
    """Return a threshold as numbers and texts, for `get_config`."""
    rule = _rule(max_norm)
    if rule is None:
        return keras.saving.serialize_keras_object(max_norm) if callable(max_norm) else max_norm
    given = {field.name: getattr(rule, field.name) for field in fields(rule) if field.init}  # type: ignore[arg-type]
    skips = {"skip_above": max_norm.skip_above} if isinstance(max_norm, AdaptiveThreshold) else {}
    return {"rule": type(rule).__name__} | given | skips


def _configured(saved: Any, *custom_objects: dict[str, Any]) -> Any:
    """Return the threshold of a configuration."""
    if not isinstance(saved, dict) or "rule" not in saved:
        return keras.saving.deserialize_keras_object(saved, *custom_objects) if isinstance(saved, dict) else saved
    given = dict(saved)
    rule, skip_above = RULES.get(given.pop("rule")), given.pop("skip_above", None)
    if rule is None:
        raise ValueError(
            f"the configuration names the rule {shown(saved['rule'])}, which is none of {', '.join(RULES)}."
        )
    return rule(**given) if skip_above is None else AdaptiveThreshold(rule(**given), skip_above=skip_above)


def _check(scope: Scope, nonfinite: Policy) -> None:
    policy = Nonfinite.named(nonfinite)
    if not isinstance(scope, str) or scope not in SCOPES:
        raise ValueError(f"scope must be one of {', '.join(map(repr, get_args(Scope)))}, got {shown(scope)}.")
    if scope == "value" and not policy.spoils:
        raise ValueError(
            f"nonfinite={nonfinite!r} applies to norms, and scope='value' has none. Omit it, or pass scope='variable'."
        )


def _clipping_of(optimizer: object) -> _Clipping:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(inner, _Clipping):
        return inner
    if isinstance(inner, keras.optimizers.MultiOptimizer):
        raise TypeError(
            "ClippingMetrics reads one norm, and each optimizer in a MultiOptimizer has its own. Remove the callback, "
            "and read last_norm and clipped_share from the optimizers that clip."
        )
    raise TypeError(
        f"ClippingMetrics needs an optimizer that clips, got {type(inner).__name__}. For example, compile the model "
        "with clipped(keras.optimizers.Adam)(max_norm=1.0)."
    )


def _largest(norms: Any, nonfinite: Policy) -> Any:
    """Return the largest norm; where steps are skipped without those that are NaN, unless all are."""
    norms = ops.cast(norms, "float32")
    if not Nonfinite.named(nonfinite).blanks:
        return ops.max(norms)
    found = ops.max(ops.where(ops.isnan(norms), -1.0, norms))
    return ops.where(found < 0, math.nan, found)


def _together(grads: list[Any], max_norm: Any, nonfinite: Policy) -> tuple[list[Any], Scalar]:
    return clip_by_global_norm(grads, max_norm, nonfinite=nonfinite)


def _one_by_one(grads: list[Any], max_norm: Any, nonfinite: Policy) -> tuple[list[Any], Scalar]:
    each = max_norm if isinstance(max_norm, numbers.Real) or not len(max_norm.shape) else ops.unstack(max_norm)
    results, norms = clip_by_layer_norm(grads, each, nonfinite=nonfinite)
    wide = any(keras.backend.standardize_dtype(norm.dtype) == "float64" for norm in norms if norm is not None)
    return results, ops.stack([ops.cast(x, "float64" if wide else "float32") for x in norms if x is not None])


def _elements(grads: list[Any], max_norm: Any, nonfinite: Policy) -> tuple[list[Any], Scalar]:
    return clip_by_value(grads, max_norm), global_norm(grads, float("inf"))


SCOPES: dict[Scope, Callable[[list[Any], Any, Policy], tuple[list[Any], Scalar]]] = {
    "global": _together,
    "variable": _one_by_one,
    "value": _elements,
}
WRAPPERS = (keras.optimizers.LossScaleOptimizer, keras.optimizers.MultiOptimizer)


def _take_names() -> None:
    """Register the clipped subclasses of Keras' own optimizers and name them here, so that loading finds them."""
    classes = [value for value in vars(keras.optimizers).values() if isinstance(value, type)]
    for cls in classes:
        if issubclass(cls, keras.optimizers.Optimizer) and cls not in (keras.optimizers.Optimizer, *WRAPPERS):
            globals()[f"Clipped{cls.__name__}"] = clipped(cls)


_take_names()
