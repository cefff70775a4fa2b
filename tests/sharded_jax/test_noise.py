"""Exact noise for sums that lie on the devices of a mesh: drawn once, and the same on all that hold a part."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradclip
from gradclip._src.private.noise import discrete
from sharded_jax.layouts import AxisType, P, mesh_of, placed

KINDS = [AxisType.Auto, AxisType.Explicit]
SENSITIVITY = gradclip.clipped_sum_sensitivity(1.0, batch_size=8)


def noised(tree):
    return gradclip.add_noise(tree, SENSITIVITY, noise_multiplier=1.0)


def values_of(array):
    """Return the whole array, after a check that no two devices hold different values of one part."""
    whole = np.full(array.shape, np.nan, array.dtype)
    for shard in array.addressable_shards:
        here = whole[shard.index]
        assert np.isnan(here).all() or (here == shard.data).all()
        whole[shard.index] = shard.data
    return whole


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_noise_is_drawn_once_for_all_devices(kind, compiled, known, monkeypatch):
    mesh = mesh_of((8,), kind)
    drawn = []

    def sampler(source, scale):
        return lambda piece: drawn.append(piece.size) or piece + np.arange(piece.size) + 1

    monkeypatch.setattr(discrete, "sampler", sampler)
    w, b = placed(mesh, [P("x"), P()], [np.zeros((16, 2), np.float32), np.zeros(3, np.float32)])
    summed = {"w": w, "b": b}
    call = jax.jit(noised) if compiled else noised
    with jax.set_mesh(mesh) if known else nullcontext():
        found = jax.block_until_ready(call(summed))
    expected = noised(jax.tree.map(np.asarray, summed))
    assert sum(drawn) == 2 * 35
    assert jax.tree.map(lambda x: values_of(x).tolist(), found) == jax.tree.map(np.ndarray.tolist, expected)
    if kind is AxisType.Explicit or not compiled:
        for name, x in summed.items():
            assert found[name].sharding.is_equivalent_to(x.sharding, x.ndim), name


@pytest.mark.parametrize("kind", KINDS)
def test_each_device_of_a_shard_map_would_draw_its_own(kind):
    mesh = mesh_of((8,), kind)
    mapped = jax.jit(jax.shard_map(noised, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    with pytest.raises(ValueError, match=r"in jax.shard_map each device would draw its own noise, .* Return the sum"):
        mapped(*placed(mesh, [P("x")], [np.zeros(16, np.float32)]))
    with pytest.raises(ValueError, match=r"in jax.shard_map each device would draw its own noise"):
        jax.pmap(noised)(jnp.zeros((jax.device_count(), 2)))


def test_terms_of_a_sum_are_refused():
    mesh = mesh_of((8,), AxisType.Explicit)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"not added up yet, .* Call jax.sharding.reshard on it"):
        jax.jit(lambda x: noised(jax.sharding.reshard(x, P(unreduced={"x"}))))(jnp.zeros(3))
