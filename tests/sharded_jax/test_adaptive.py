"""Thresholds that follow, where each device holds a part of the updates: one norm, and one state, for all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradclip import QuantileRule
from gradclip.integrations.optax import adaptive_clip_by_global_norm, skip_spikes
from sharded_jax.layouts import AxisType, P, mesh_of

RULE = QuantileRule(window=4)
NORMS = [5.0, 10.0, 40.0, 500.0, 7.0]
MAKE = {
    "clipped": lambda **s: adaptive_clip_by_global_norm(RULE, **s),
    "zeroed": lambda **s: adaptive_clip_by_global_norm(RULE, skip_above=10.0, **s),
    "skipped": lambda **s: skip_spikes(optax.sgd(1.0, momentum=0.5), RULE, skip_above=10.0, **s),
}


def steps(transform, whole):
    """Return the last updates, and the history, the norm and the threshold of the last state."""
    params = jnp.zeros_like(whole)
    state = transform.init(params)
    for norm in NORMS:
        updates, state = transform.update(whole * norm, state, params)
    clip = getattr(state, "clip", state)
    return updates, (clip.history, clip.norm, clip.max_norm, clip.num_clipped, clip.num_skipped)


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_as_on_one_device(make, checked):
    rng = np.random.default_rng(0)
    whole = rng.standard_normal(16)
    whole = jnp.asarray(whole / np.linalg.norm(whole), jnp.float32)
    call = jax.shard_map(
        lambda x: steps(make(axis_name="x"), x),
        mesh=mesh_of((8,), AxisType.Auto),
        in_specs=P("x"),
        out_specs=(P("x"), P()),
        check_vma=checked,
    )
    found, expected = jax.jit(call)(whole), steps(make(), whole)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, expected)


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("spec", [P("x"), P()])
def test_all_devices_count_norms_beyond_float32(checked, spec):
    transform = adaptive_clip_by_global_norm(RULE, nonfinite="drop", axis_name="x")

    def last(values):
        state = transform.init(values[0])
        for value in values:
            _, state = transform.update(value, state)
        return state.num_clipped, state.num_skipped

    call = jax.shard_map(
        last, mesh=mesh_of((8,), AxisType.Auto), in_specs=P(None, *spec), out_specs=P(), check_vma=checked
    )
    values = jnp.ones((4, 16)).at[1].set(3e38).at[2, 3].set(jnp.inf).at[3, 9].set(jnp.nan)
    assert [int(count) for count in jax.jit(call)(values)] == [1, 2]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_skipped_step_is_sharded_as_one_that_is_taken(kind):
    whole = jnp.full(16, 0.25)
    mesh = mesh_of((8,), kind)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(whole, jax.NamedSharding(mesh, P("x")))
        found = jax.jit(lambda x: steps(MAKE["skipped"](), x))(sharded)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, steps(MAKE["skipped"](), whole))
