"""Execution plans of jax-privacy with gradclip's sums, beside the plans as they are."""

import dataclasses
import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_privacy.experimental import execution_plan

from gradclip.integrations.jax_privacy import BoundedSensitivityCallable, with_gradclip

# The peer calls a function that its own dependency calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning:optax")

X = jax.random.normal(jax.random.key(0), (24, 3))
Y = X @ jnp.array([1.0, -2.0, 0.5])
STEPS = 2  # JAX compiles each batch size anew
PARAMS = {"w": jnp.zeros(3), "b": jnp.zeros(())}


def loss(params, x, y):
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def config(**settings):
    known = {"iterations": STEPS, "strategy": np.ones(1), "epsilon": None, "delta": None, "sampling_prob": 0.5}
    return execution_plan.BandMFExecutionPlanConfig(
        **known | {"noise_multiplier": 1.0, "noise_seed": 3, "l2_clip_norm": 0.5, "normalize_by": 12.0} | settings
    )


def trained(plan):
    """Train as a plan's documentation says, and return the parameters and the clipped sums."""
    params, noise_state, sums = PARAMS, plan.noise_addition_transform.init(PARAMS), []
    clipped = plan.clipped_grad(loss, batch_argnums=(1, 2))
    for indices in plan.batch_selection_strategy.batch_iterator(len(X), rng=np.random.default_rng(0)):
        summed = clipped(params, X[indices], Y[indices])
        noisy, noise_state = plan.noise_addition_transform.update(summed, noise_state)
        params = jax.tree.map(lambda p, g: p - 0.5 * g, params, noisy)
        sums.append(summed)
    return params, sums


@pytest.mark.parametrize("settings", [{}, {"rescale_to_unit_norm": False}, {"dtype": jnp.float16}])
def test_training_goes_the_same_way(settings):
    theirs, ours = config(**settings).plan, with_gradclip(config(**settings)).plan
    (params, sums), (my_params, my_sums) = trained(theirs), trained(ours)
    tolerance = 2e-2 if settings.get("dtype") == jnp.float16 else 2e-6
    assert len(my_sums) == STEPS
    for their, my in zip(jax.tree.leaves((params, sums)), jax.tree.leaves((my_params, my_sums)), strict=True):
        assert my.dtype == their.dtype
        np.testing.assert_allclose(np.float32(my), np.float32(their), rtol=tolerance, atol=tolerance)


def test_the_rest_of_the_plan_stays():
    theirs, ours = config().plan, with_gradclip(config()).plan
    kept = [field.name for field in dataclasses.fields(theirs) if field.name != "clipped_grad"]
    assert len(kept) >= 3
    assert type(ours) is type(theirs)
    assert ours.dp_event == theirs.dp_event
    assert ours.batch_selection_strategy == theirs.batch_selection_strategy
    made = ours.clipped_grad(loss, batch_argnums=(1, 2))
    assert isinstance(made, BoundedSensitivityCallable)
    assert theirs.clipped_grad(loss, batch_argnums=(1, 2)).sensitivity() == 1.0 / 12.0 < Fraction(1, 12)
    assert made.sensitivity() == math.nextafter(1.0 / 12.0, 1.0) > Fraction(1, 12)  # rounded up


@dataclasses.dataclass(frozen=True)
class Plan:
    clipped_grad: Any = None
    noise: str = "theirs"


class Newer:
    """A config as those of jax-privacy 2.3: its settings for speed come with the flags."""

    l2_clip_norm = 2.0
    rescale_to_unit_norm = False
    normalize_by = 4.0

    def make(self, performance_flags):
        return Plan(noise=f"for {performance_flags}")


def flags(**settings):
    known = {"dtype": jnp.float32, "microbatch_size": None, "spmd_axis_name": None, "keep_batch_dim": True}
    return SimpleNamespace(**known | settings, noise_seed=0)


@pytest.mark.parametrize(
    ("given", "dtype", "microbatch"),
    [
        (None, "float32", None),
        (flags(), "float32", None),
        (flags(dtype=jnp.float16), "float16", None),
        (flags(microbatch_size=4), "float32", 4),
        (flags(keep_batch_dim=False), "float32", None),
    ],
    ids=["no flags", "usual", "dtype", "microbatches", "examples without an axis"],
)
def test_flags_reach_the_sum(given, dtype, microbatch):
    plan = with_gradclip(Newer()).make(given)
    assert plan.noise == f"for {given}"
    ndim = 1 if given is not None and not given.keep_batch_dim else 2

    def loss(params, data, key):
        assert data.ndim == ndim
        return jnp.sum(data * params) * 10.0, {"key": jax.random.uniform(key)}

    made = plan.clipped_grad(
        loss,
        has_aux=True,
        return_values=True,
        return_grad_norms=True,
        pre_clipping_transform=lambda g: g * 2.0,
        prng_argnum=2,
    )
    padding = jnp.arange(24) >= 20
    summed, aux = jax.jit(made)(jnp.ones(3), X, jax.random.key(1), is_padding_example=padding)
    assert summed.dtype == dtype
    rows = np.asarray(X[:20], np.float64) * 20
    exact = (rows * np.minimum(1, 2 / np.linalg.norm(rows, axis=1))[:, None]).sum(0) / 4
    np.testing.assert_allclose(np.float32(summed), exact, rtol=2e-3 if dtype == "float16" else 1e-5)
    np.testing.assert_allclose(aux.grad_norms[:20], np.linalg.norm(rows, axis=1) / 2, rtol=1e-5)
    assert len({*aux.aux["key"].tolist()}) >= 20
    assert made.clipped.microbatch_size == microbatch
    assert made.sensitivity() == 0.5


@pytest.mark.parametrize("bad", [None, object(), Plan(), Newer, with_gradclip(Newer())], ids=lambda x: type(x).__name__)
def test_what_says_not_how_to_clip_is_named(bad):
    with pytest.raises(TypeError, match="config must be a config of jax-privacy with l2_clip_norm"):
        with_gradclip(bad)
