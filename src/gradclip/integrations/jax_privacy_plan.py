"""The execution plans and `DPTrainer` of jax-privacy, with gradclip's sums of clipped gradients."""

import dataclasses
from functools import partial
from typing import Any

import jax.numpy as jnp

from gradclip.integrations.jax_privacy_sums import clipped_grad

_OF_CONFIG = ("l2_clip_norm", "rescale_to_unit_norm", "normalize_by")
_OF_FLAGS = ("dtype", "microbatch_size", "spmd_axis_name", "keep_batch_dim")


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """A config of jax-privacy whose plans clip and sum with gradclip. `with_gradclip` makes it from `config`."""

    config: Any

    @property
    def plan(self) -> Any:
        """The plan, as a config of jax-privacy 2.0 has it."""
        return self._with_ours(self.config.plan, self.config)

    def make(self, performance_flags: object = None) -> Any:
        """Return the plan for these flags, as a config of jax-privacy has it since 2.3."""
        return self._with_ours(self.config.make(performance_flags), performance_flags)

    def _with_ours(self, plan: Any, flags: object) -> Any:
        settings = {name: getattr(self.config, name) for name in _OF_CONFIG}
        settings |= {"dtype": jnp.float32} if flags is None else _found(flags)
        return dataclasses.replace(plan, clipped_grad=partial(clipped_grad, **settings))


def with_gradclip(config: object) -> PlanConfig:
    """Return a config of jax-privacy whose plans clip and sum with gradclip, for `DPTrainer` or a loop of your own.

    The plan keeps its batch selection, its noise and its privacy accounting. Only `clipped_grad` is gradclip's, with
    the threshold and the other settings of `config`.

    Args:
        config: a `BandMFConfig`, or a `BandMFExecutionPlanConfig` of jax-privacy 2.0, calibrated: calibrate it first.

    Returns:
        An object with `plan` (jax-privacy 2.0) and `make(performance_flags)` (since 2.3).

    Raises:
        TypeError: `config` is none that says how to clip.

    `DPTrainer(config=with_gradclip(config), loss_fn=loss_fn, optimizer=optimizer)` trains with it.
    """
    lacking = [name for name in _OF_CONFIG if not hasattr(config, name)]
    if lacking or isinstance(config, type):
        raise TypeError(
            f"config must be a config of jax-privacy with {', '.join(_OF_CONFIG)}, such as a BandMFConfig, got a "
            f"{type(config).__name__}{f' without {lacking[0]}' if lacking else ''}."
        )
    return PlanConfig(config)


def _found(flags: object) -> dict[str, Any]:
    return {name: getattr(flags, name) for name in _OF_FLAGS if hasattr(flags, name)}
