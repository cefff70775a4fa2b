"""Integers beside what is differentiated, and their derivatives, which JAX calls `float0`."""

import jax
import jax.experimental.sparse
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip


def test_sums_over_examples_refuse_integers_by_name(framework):
    grads = {"w": framework.array([[3.0, 4.0]]), "n": framework.from_numpy(np.array([[100]]))}
    with pytest.raises(TypeError, match=r"integers cannot be in a sum .* \['n'\] has dtype int.* leave them"):
        framework.call(lambda g: gradclip.per_example_clip(g, 1.0)[0], grads)


@pytest.mark.parametrize("make", [jnp.array, torch.tensor], ids=["jax", "torch"])
def test_parameters_to_differentiate_that_are_integers_are_named(make):
    loss = lambda p, x: (p["w"] * x).sum() * p["n"]
    for call in (gradclip.clipped_grad(loss, 1.0), gradclip.clipped_grad(loss, 1.0, method="loop")):
        with pytest.raises(TypeError, match=r"argument 0\['n'\] has dtype int.*, which has no gradient"):
            call({"w": make([1.0, 2.0]), "n": make(3)}, make([[1.0, 2.0]]))


def test_derivatives_are_those_without_integers():
    def total(w, n, clip):
        tree = {"w": w} if n is None else {"a": n, "w": w, "z": n > 0}
        return clip(tree, 1.0)[0]["w"][0]

    for clip in (gradclip.clip_by_global_norm, gradclip.clip_by_layer_norm, gradclip.clip_by_unit_norm):
        w, n = jnp.array([3.0, 4.0]), jnp.array([100])
        for wrap in (lambda f: f, jax.jit):
            found = wrap(jax.grad(lambda w, n, clip=clip: total(w, n, clip)))(w, n)
            assert found.tolist() == jax.grad(lambda w, clip=clip: total(w, None, clip))(w).tolist()
        found = jax.jvp(lambda w, n=n, clip=clip: total(w, n, clip), (w,), (jnp.ones(2),))
        assert found[1] == jax.jvp(lambda w, clip=clip: total(w, None, clip), (w,), (jnp.ones(2),))[1]
        w, n = torch.tensor([3.0, 4.0], requires_grad=True), torch.tensor([100])
        (found,), (expected,) = (torch.autograd.grad(total(w, one, clip), w) for one in (n, None))
        assert found.equal(expected)


def test_derivatives_of_integers_inside_a_program():
    @jax.jit
    def step(p):
        grads = jax.grad(lambda p: (p["w"] ** 2).sum() / 2 * p["n"][0], allow_int=True)(p)
        clipped, norm = gradclip.clip_by_global_norm(grads, 1.0)
        return clipped["w"], clipped["n"], norm

    w, n, norm = step({"w": jnp.array([3.0, 4.0]), "n": jnp.array([1, 5])})
    assert (w.tolist(), n.dtype, n.shape, float(norm)) == (pytest.approx([0.6, 0.8]), jax.dtypes.float0, (2,), 5.0)


@pytest.mark.parametrize("wrap", [lambda function: function, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("options", [{}, {"per_layer": True}, {"mask": [True, True, False]}])
def test_sums_over_examples_with_derivatives_of_integers(wrap, options):
    grads = {"n": np.zeros((3, 5), jax.dtypes.float0), "w": jnp.array([[3.0, 4.0], [0.3, 0.4], [6.0, 8.0]])}
    found, info = wrap(lambda g: gradclip.per_example_clip(g, 1.0, **options))(grads)
    expected, known = gradclip.per_example_clip({"w": grads["w"]}, 1.0, **options)
    assert (found["n"].shape, found["n"].dtype) == ((5,), jax.dtypes.float0)
    np.testing.assert_array_equal(found["w"], expected["w"])
    if "per_layer" in options:
        assert (int(info.num_clipped["n"]), info.norms["n"].tolist()) == (0, [0.0, 0.0, 0.0])
        info, known = jax.tree.map(lambda x: x["w"], (info, known), is_leaf=lambda x: isinstance(x, dict))
    np.testing.assert_array_equal(info.norms, known.norms)
    assert int(info.num_clipped) == int(known.num_clipped)


@pytest.mark.parametrize("options", [{}, {"microbatch_size": 2}, {"method": "loop"}, {"normalize_by": 2.0}])
def test_functions_of_examples_with_derivatives_of_integers(options):
    def gradient(x):
        loss = lambda p: (p["w"] * x.sum(0)).sum() * p["n"][0]
        return jax.grad(loss, allow_int=True)({"w": jnp.ones(2), "n": jnp.array([1, 2, 3])})

    x = jnp.array([[3.0, 4.0], [0.3, 0.4], [6.0, 8.0]])
    found = gradclip.clipped_fun(gradient, 1.0, **options)(x)
    expected = gradclip.clipped_fun(lambda x: {"w": gradient(x)["w"]}, 1.0, **options)(x)
    assert (found["n"].shape, found["n"].dtype) == ((3,), jax.dtypes.float0)
    np.testing.assert_array_equal(found["w"], expected["w"])
