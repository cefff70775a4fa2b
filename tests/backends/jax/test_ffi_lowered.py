"""Where the kernels are called, and what `vmap` and calls outside traced code make of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradclip
from compilations import compiled_in
from gradclip._src.backends.jax import kernels


def lowered(function, *args, **where):
    return jax.jit(function).trace(*args).lower(**where).as_text()


def test_only_programs_for_the_cpu_call_the_kernels():
    x = jnp.ones(3)
    assert lowered(gradclip.global_norm, x).count("custom_call @gradclip_power_sums") == 1
    assert "custom_call @gradclip" not in lowered(gradclip.global_norm, x, lowering_platforms=("tpu",))
    assert "custom_call @gradclip" not in lowered(gradclip.global_norm, x, lowering_platforms=("cpu", "tpu"))


def test_mapped_calls_outside_traced_code_compile_once():
    rows, others = jnp.arange(6.0).reshape(2, 3), jnp.arange(6.0, 12.0).reshape(2, 3)
    expected = np.linalg.norm(np.arange(6.0).reshape(2, 3), axis=1)
    np.testing.assert_allclose(jax.vmap(gradclip.global_norm)(rows), expected, rtol=1e-6)
    assert compiled_in(lambda: jax.vmap(gradclip.global_norm)(others)) == 0


def test_axes_that_are_mapped_come_first_and_others_have_length_one():
    columns, row = jnp.array([[3.0, 6.0], [4.0, 8.0]]), jnp.array([12.0])
    with jax.enable_x64(True):
        found = jax.vmap(lambda x, y: kernels.power_sums([x, y], 2.0, -1.0, ())[0], in_axes=(1, None))(columns, row)
    assert found.tolist() == [169.0, 244.0]


def test_vectors_that_are_not_mapped_are_repeated():
    scale = jnp.array([10.0, 20.0])
    found = jax.vmap(lambda x: kernels.entries([x, scale]))(jnp.array([[1.0], [2.0], [3.0]]))
    assert [[x.tolist() for x in of_vector] for of_vector in found] == [
        [[1.0, 2.0, 3.0]],
        [[10.0] * 3, [20.0] * 3],
    ]


def test_batches_that_are_mapped_are_added_one_by_one():
    batch, weighing = jnp.array([[[3.0, 4.0]], [[6.0, 8.0]]]), jnp.array([1.0, 0.0, 5.0, 1.0, 5.0])
    with jax.enable_x64(True):
        call = jax.vmap(lambda x, rule: kernels.add_examples([x], rule, jnp.zeros(1), 2), in_axes=(0, None))
        squares, totals = call(batch, weighing.astype(jnp.float64))
    assert squares.tolist() == [[25.0], [100.0]]
    assert totals.tolist() == [[3.0, 4.0], [3.0, 4.0]]


@pytest.mark.parametrize("compiled", [jax.jit, lambda call: call], ids=["jit", "eager"])
@pytest.mark.parametrize(
    ("axes", "grads", "mask"), [((0, None), (0, 4, 3), (4,)), ((0, 0), (0, 4, 3), (0, 4)), ((None, 1), (4, 3), (4, 0))]
)
def test_mapping_over_no_rows_returns_none(axes, grads, mask, compiled):
    call = jax.vmap(lambda grads, mask: gradclip.per_example_clip(grads, 1.0, mask=mask), in_axes=axes)
    total, info = compiled(call)(jnp.ones(grads), jnp.ones(mask, bool))
    assert (total.shape, info.norms.shape, info.num_clipped.shape) == ((0, 3), (0, 4), (0,))


@pytest.mark.parametrize("method", ["materialize", "ghost", "loop"])
def test_gradients_of_no_batches_are_none(method):
    call = gradclip.clipped_grad(lambda p, x: (p * x).sum(), 1.0, method=method)
    assert jax.vmap(call, in_axes=(None, 0))(jnp.ones(3), jnp.zeros((0, 4, 3))).shape == (0, 3)


def test_meshes_of_one_device():
    x = jnp.array([3.0, 4.0])
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((1,), ("d",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            spread = jax.device_put(x, jax.NamedSharding(mesh, jax.P("d")))
            assert float(jax.jit(gradclip.global_norm)(spread)) == 5.0
            clipped = jax.jit(lambda x: gradclip.clip_by_global_norm(x, 1.0)[0])(spread)
            np.testing.assert_allclose(clipped, [0.6, 0.8], rtol=1e-6)
            shards = jax.shard_map(gradclip.global_norm, in_specs=jax.P("d"), out_specs=jax.P())
            assert float(jax.jit(shards)(spread)) == 5.0
