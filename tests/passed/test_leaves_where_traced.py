"""`where=` in code that frameworks trace, compile or differentiate, and in trees that only they know."""

import math

import jax
import jax.experimental.sparse
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import gradclip

TREE = {"w": jnp.array([3.0, 4.0]), "head": jnp.array([5.0, 12.0])}


def clip(tree, max_norm=1.0, where="w"):
    return gradclip.clip_by_global_norm(tree, max_norm, where=where)


@pytest.mark.parametrize("where", ["w", lambda name: name == "w"])
def test_jit(where):
    clipped, norm = jax.jit(lambda t: clip(t, where=where))(TREE)
    np.testing.assert_allclose(clipped["w"], [0.6, 0.8], rtol=1e-6)
    assert clipped["head"].tolist() == [5.0, 12.0]
    assert float(norm) == 5.0
    with pytest.raises(ValueError, match="'x' matches none of head, w"):
        jax.jit(lambda t: clip(t, where="x"))(TREE)


def test_the_derivative_of_what_is_left_is_the_identity():
    jacobian = jax.jacrev(lambda t: clip(t)[0])(TREE)
    alone = jax.jacrev(lambda w: gradclip.clip_by_global_norm(w, 1.0)[0])(TREE["w"])
    np.testing.assert_array_equal(jacobian["head"]["head"], np.eye(2))
    np.testing.assert_array_equal(jacobian["w"]["head"], np.zeros((2, 2)))
    np.testing.assert_array_equal(jacobian["head"]["w"], np.zeros((2, 2)))
    np.testing.assert_allclose(jacobian["w"]["w"], alone, rtol=1e-6)
    forward = jax.jvp(lambda t: clip(t)[0]["head"], (TREE,), (TREE,))[1]
    np.testing.assert_array_equal(forward, TREE["head"])
    by_norm = jax.grad(lambda t: clip(t)[1])(TREE)
    np.testing.assert_allclose(by_norm["w"], [0.6, 0.8], rtol=1e-6)
    assert by_norm["head"].tolist() == [0.0, 0.0]


def test_vmap():
    batch = {"w": jnp.array([[3.0, 4.0], [0.3, 0.4]]), "head": jnp.full((2, 1), math.nan)}
    clipped, norms = jax.vmap(clip)(batch)
    np.testing.assert_allclose(clipped["w"], [[0.6, 0.8], [0.3, 0.4]], rtol=1e-6)
    np.testing.assert_allclose(norms, [5.0, 0.5], rtol=1e-6)
    assert bool(jnp.isnan(clipped["head"]).all())


def test_derivatives_of_pytorch():
    w, head = torch.tensor([3.0, 4.0], requires_grad=True), torch.tensor([5.0], requires_grad=True)
    clipped, _ = clip({"w": w, "head": head})
    assert clipped["head"] is head
    (clipped["w"].sum() + 7 * clipped["head"].sum()).backward()
    assert head.grad.tolist() == [7.0]
    assert torch.isfinite(w.grad).all()


@pytest.mark.parametrize("where", ["w", ["[v-x]", "?"], lambda name: name == "w"])
def test_compiled_by_pytorch(where):
    tree = {"w": torch.tensor([3.0, 4.0]), "head": torch.tensor([math.nan])}
    torch.compiler.reset()
    compiled = torch.compile(lambda t: clip(t, where=where), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(tree), clip(tree), equal_nan=True)


def test_graphs_of_tensorflow():
    import tensorflow as tf

    tree = {"w": tf.constant([3.0, 4.0]), "head": tf.constant([math.nan])}
    clipped, norm = tf.function(clip)(tree)
    np.testing.assert_allclose(clipped["w"], [0.6, 0.8], rtol=1e-6)
    assert math.isnan(clipped["head"][0])
    assert float(norm) == 5.0


def test_modules_of_flax():
    class Model(nnx.Module):
        def __init__(self):
            self.body = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
            self.head = nnx.Linear(1, 1, rngs=nnx.Rngs(1))

    grads = nnx.grad(lambda model: 10 * model.head(model.body(jnp.array([3.0, 4.0]))).sum())(Model())
    clipped, norm = clip(grads, 0.1, where=lambda name: "body" in name)
    expected, known = gradclip.clip_by_global_norm(grads["body"], 0.1)
    assert float(norm) == float(known) > 1.0
    np.testing.assert_array_equal(clipped["body"]["kernel"][...], expected["kernel"][...])
    np.testing.assert_array_equal(clipped["head"]["kernel"][...], grads["head"]["kernel"][...])


def test_sparse_arrays():
    sparse = jax.experimental.sparse.BCOO.fromdense(jnp.array([0.0, 3.0, 4.0]))
    clipped, norm = clip({"w": sparse, "head": sparse}, where="w")
    assert clipped["head"] is sparse
    assert float(norm) == 5.0
    np.testing.assert_allclose(clipped["w"].todense(), [0.0, 0.6, 0.8], rtol=1e-6)


def test_shards_over_a_mesh():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()
    call = jax.shard_map(
        lambda t: gradclip.global_norm(t, axis_name="x", where="w"), mesh=mesh, in_specs=(split,), out_specs=whole
    )
    assert float(jax.jit(call)(TREE)) == 5.0
