"""Optimizers of Keras 3 that clip on gradclip's engine, on the backends of JAX, PyTorch and TensorFlow.

`clipped(keras.optimizers.Adam)` is a class of optimizers that takes the arguments of Adam, and `max_norm`. What differs
from `global_clipnorm` and its siblings: the bounds hold exactly, norms do not overflow, the norm and the share of
clipped steps can be read, and under `tf.distribute` what is clipped is the sum over replicas, not the part of each.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from gradclip.arguments import check_threshold
from gradclip.clip import clip_by_global_norm, clip_by_layer_norm, clip_by_value, global_norm
from gradclip.core.nonfinite import Nonfinite
from gradclip.integrations import needed_for
from gradclip.typing import Policy, Scalar

with needed_for("keras"):
    import keras
    from keras import ops

__all__ = ["ClippingMetrics", "clipped"]

Scope: TypeAlias = Literal["global", "variable", "value"]
Optimizer = TypeVar("Optimizer", bound="keras.optimizers.Optimizer")
OF_KERAS = ("clipnorm", "global_clipnorm", "clipvalue")


def clipped(optimizer: type[Optimizer]) -> Callable[..., Optimizer]:
    """Return a subclass of a Keras optimizer class that clips gradients before each update, the same class every time.

    Its instances take three arguments more, all by keyword:

    max_norm: the threshold, a number >= 0, in the units of the gradients.
    scope: what shares a norm: "global" all variables, "variable" each variable, "value" each element.
    nonfinite: what NaN and infinities do, as in `gradclip.clip_by_global_norm`; not for the scope "value".

    They clip what an update is made of: the sum over all replicas under `tf.distribute`, the mean of the gradients
    accumulated, gradients divided by the loss scale. `last_norm` is the norm before clipping of the last update: for
    "variable" the largest norm of a variable, for "value" the largest magnitude. `clipped_share` is the share of
    updates so far of which the norm exceeded `max_norm`. Both are scalar tensors, kept in variables of the optimizer.

    The class is registered for saving. Those of Keras' own optimizers can be loaded once this module has been
    imported, those of other optimizers once `clipped` has been called.

    Raises:
        TypeError: `optimizer` is no class of Keras optimizers, or one that only passes gradients on to others.
        ValueError, when an optimizer is made: an unknown scope or policy, a negative threshold or NaN, or one of Keras'
        own (`clipnorm`, `global_clipnorm`, `clipvalue`) beside it.

    >>> optimizer = clipped(keras.optimizers.SGD)(learning_rate=1.0, max_norm=1.0)
    >>> weights = keras.Variable([0.0, 0.0])
    >>> optimizer.apply([ops.array([3.0, 4.0])], [weights])
    >>> [round(float(x), 4) for x in weights.numpy()], float(optimizer.last_norm), float(optimizer.clipped_share)
    ([-0.6, -0.8], 5.0, 1.0)
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, keras.optimizers.Optimizer)):
        raise TypeError(
            f"clipped takes a class of Keras optimizers, got {optimizer!r:.80}. Write "
            "clipped(keras.optimizers.Adam)(learning_rate=0.001, max_norm=1.0)."
        )
    if issubclass(optimizer, WRAPPERS):
        raise TypeError(
            f"{optimizer.__name__} passes gradients on to other optimizers, which have to clip them. Give it clipped "
            f"ones: {optimizer.__name__}(clipped(keras.optimizers.Adam)(max_norm=1.0)), for example."
        )
    if issubclass(optimizer, _Clipping):
        return optimizer
    # On PyTorch, Keras makes an instance of another class, which updates all variables at once.
    return _subclass(keras.optimizers.Optimizer.__new__(optimizer).__class__)


class ClippingMetrics(keras.callbacks.Callback):
    """A callback that adds `grad_norm` and `clipped_share` to the logs of each epoch.

    `grad_norm` is the norm before clipping of the epoch's last update, `clipped_share` the share of the epoch's updates
    that were clipped. Callbacks that use them, such as `keras.callbacks.CSVLogger`, stand behind this one. Nothing is
    fetched from a device before the epoch ends.

    Raises:
        TypeError: the model's optimizer is not one of `clipped`.
    """

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._before = _clipping_of(self.model.optimizer).counts()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        optimizer = _clipping_of(self.model.optimizer)
        clipped_steps, steps = (now - then for now, then in zip(optimizer.counts(), self._before, strict=True))
        if logs is not None:
            logs["grad_norm"] = float(optimizer.last_norm)
            logs["clipped_share"] = clipped_steps / max(steps, 1)


class _Clipping(keras.optimizers.Optimizer):
    """What stands before a class of optimizers: the arguments of `clipped`, and clipping just before the update."""

    def __init__(
        self, *args: Any, max_norm: float, scope: Scope = "global", nonfinite: Policy = "propagate", **kwargs: Any
    ) -> None:
        threshold = float(check_threshold(max_norm))
        _check(scope, nonfinite)
        super().__init__(*args, **kwargs)
        given = {name: getattr(self, name) for name in OF_KERAS if getattr(self, name) is not None}
        if given:
            raise ValueError(
                f"max_norm and Keras' own {', '.join(f'{name}={value}' for name, value in given.items())} both clip. "
                "Pass max_norm alone, with scope='variable' for clipnorm and scope='value' for clipvalue."
            )
        self.max_norm, self.scope, self.nonfinite = threshold, scope, nonfinite
        self._norm = self.add_variable((), dtype="float32", aggregation="only_first_replica", name="last_norm")
        self._clipped_steps = self.add_variable((), dtype="int", aggregation="only_first_replica", name="clipped_steps")

    @property
    def last_norm(self) -> Scalar:
        """The norm before clipping of the last update; 0 before the first."""
        return ops.copy(self._norm)

    @property
    def clipped_share(self) -> Scalar:
        """The share of updates so far that were clipped; 0 before the first."""
        return ops.divide(ops.cast(self._clipped_steps, "float32"), ops.maximum(self.iterations, 1))

    def counts(self) -> tuple[int, int]:
        """Return how many updates have been clipped, and how many there have been."""
        return int(ops.copy(self._clipped_steps)), int(ops.copy(self.iterations))

    def get_config(self) -> dict[str, Any]:
        settings = {"max_norm": self.max_norm, "scope": self.scope, "nonfinite": self.nonfinite}
        return super().get_config() | settings

    def __reduce__(self) -> tuple[Any, ...]:
        _, saved = super().__reduce__()
        # That a process which unpickles it has imported this module, and knows the class.
        return _unpickled, (next(cls for cls in type(self).__mro__ if cls.__module__ != __name__), *saved)

    def _clip_gradients(self, grads: Sequence[Any]) -> list[Any]:
        results, norm = SCOPES[self.scope](list(grads), self.max_norm, self.nonfinite)
        self._norm.assign(ops.cast(norm, "float32"))
        self._clipped_steps.assign_add(ops.cast(norm > self.max_norm, self._clipped_steps.dtype))
        return results


class _ClippingSums(_Clipping):
    """The same on TensorFlow, where a replica has its own part of the gradients until they are added up."""

    def _clip_gradients(self, grads: Sequence[Any]) -> list[Any]:
        return list(grads)

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


def _unpickled(optimizer: type[keras.optimizers.Optimizer], saved: Any) -> Any:
    clipped(optimizer)
    return optimizer._unpickle_model(saved)


def _check(scope: Scope, nonfinite: Policy) -> None:
    Nonfinite.named(nonfinite)
    if not isinstance(scope, str) or scope not in SCOPES:
        raise ValueError(f"scope must be one of {', '.join(map(repr, get_args(Scope)))}, got {scope!r:.80}.")
    if scope == "value" and nonfinite != "propagate":
        raise ValueError(
            f"nonfinite={nonfinite!r} is for norms, and scope='value' has none. Leave it out, or take scope='variable'."
        )


def _clipping_of(optimizer: Any) -> _Clipping:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(inner, _Clipping):
        return inner
    if isinstance(inner, keras.optimizers.MultiOptimizer):
        raise TypeError(
            "ClippingMetrics reads one norm, and each optimizer in a MultiOptimizer has its own. Leave the callback "
            "out, and read last_norm and clipped_share of the optimizers that clip."
        )
    raise TypeError(
        f"ClippingMetrics needs an optimizer that clips, got {type(inner).__name__}. Compile the model with "
        "clipped(keras.optimizers.Adam)(max_norm=1.0), for example."
    )


def _together(grads: list[Any], max_norm: float, nonfinite: Policy) -> tuple[list[Any], Scalar]:
    return clip_by_global_norm(grads, max_norm, nonfinite=nonfinite)


def _one_by_one(grads: list[Any], max_norm: float, nonfinite: Policy) -> tuple[list[Any], Scalar]:
    results, norms = clip_by_layer_norm(grads, max_norm, nonfinite=nonfinite)
    return results, ops.max(ops.stack([ops.cast(norm, "float32") for norm in norms if norm is not None]))


def _elements(grads: list[Any], max_norm: float, nonfinite: Policy) -> tuple[list[Any], Scalar]:
    return clip_by_value(grads, max_norm), global_norm(grads, float("inf"))


SCOPES: dict[Scope, Callable[[list[Any], float, Policy], tuple[list[Any], Scalar]]] = {
    "global": _together,
    "variable": _one_by_one,
    "value": _elements,
}
WRAPPERS = (keras.optimizers.LossScaleOptimizer, keras.optimizers.MultiOptimizer)


def _take_names() -> None:
    """Register those of Keras' own optimizers, and name them here, so that they are found when they are loaded."""
    classes = [value for value in vars(keras.optimizers).values() if isinstance(value, type)]
    for cls in classes:
        if issubclass(cls, keras.optimizers.Optimizer) and cls not in (keras.optimizers.Optimizer, *WRAPPERS):
            globals()[f"Clipped{cls.__name__}"] = clipped(cls)


_take_names()
