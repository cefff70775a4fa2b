"""What `per_example_clip` offers, by way of `clipped_grad`."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip


def loss(params, x, y):
    return ((x @ params["w"] - y) ** 2).sum()


@pytest.mark.parametrize("microbatch_size", [None, 1, 3, 8])
def test_sums_on_a_grid_do_not_depend_on_microbatches(microbatch_size):
    with jax.enable_x64(True):
        weights, batch = (
            jnp.ones(5, jnp.float32),
            jnp.asarray(np.random.default_rng(0).normal(size=(8, 5)), jnp.float32),
        )
        loss = lambda w, x: jnp.sum(x * w) * 9.0  # its gradient, 9 x, is the same however it is compiled
        whole = gradclip.clipped_grad(loss, 1.0, grid=10**6)(weights, batch)
        parts = gradclip.clipped_grad(loss, 1.0, grid=10**6, microbatch_size=microbatch_size)
        assert whole.dtype == jnp.int64
        assert jnp.array_equal(jax.jit(parts)(weights, batch), whole)
        assert parts.sensitivity().rounding == 0.0
    with pytest.raises(ValueError, match="Leave out normalize_by"):
        gradclip.clipped_grad(loss, 1.0, grid=10, normalize_by=2.0)


@pytest.mark.parametrize("rule", ["normalize", "automatic"])
def test_rules_and_groups_reach_the_sum(rule):
    weights = {"a": jnp.ones(3), "b": jnp.ones(2)}
    rows = jnp.asarray(np.random.default_rng(1).normal(size=(6, 3)), jnp.float32)
    loss = lambda w, x: jnp.sum(jnp.tanh(x @ w["a"])) + jnp.sum(w["b"]) * x[0, 0]
    got = gradclip.clipped_grad(loss, {"a": 1.0, "b": 0.5}, rule=rule, microbatch_size=4)(weights, rows)
    grads = jax.vmap(lambda x: jax.grad(loss)(weights, x[None]))(rows)
    expected, _ = gradclip.per_example_clip(grads, {"a": 1.0, "b": 0.5}, rule=rule)
    for key in weights:
        np.testing.assert_allclose(got[key], expected[key], rtol=1e-5)


def test_half_types_are_summed_in_float32():
    for make, name in ((jnp.asarray, jnp.bfloat16), (torch.as_tensor, torch.bfloat16)):
        params, x = make(np.ones(1, np.float32)), make(np.ones((4096, 1), np.float32))
        x = x.astype(name) if make is jnp.asarray else x.to(name)
        params = params.astype(name) if make is jnp.asarray else params.to(name)
        summed = gradclip.clipped_grad(lambda p, x: (p * x).sum(), 2.0, microbatch_size=512)(params, x)
        assert str(summed.dtype).endswith("float32")
        assert summed.tolist() == [4096.0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_lone_example_is_at_most_the_threshold(dtype):
    grads = np.random.default_rng(0).normal(size=(50, 1, 33)).astype(np.float32)
    clipped = jax.jit(gradclip.clipped_grad(lambda p, x: (p * x.astype(p.dtype)).sum(), 0.1))
    for row in grads:
        exact = [float(v) for v in np.asarray(clipped(jnp.zeros(33, dtype), row))]
        # Of its terms, not of the sum: that has been rounded to float32.
        assert math.fsum(v * v for v in exact) <= (0.1 * (1.0 + 2.0**-24)) ** 2


@pytest.mark.parametrize("batch", [np.zeros((0, 1, 4, 4), np.float32), torch.zeros(0, 1, 4, 4)], ids=["numpy", "torch"])
@pytest.mark.parametrize("settings", [{}, {"microbatch_size": 2}, {"nonfinite": "raise"}, {"keep_batch_dim": False}])
def test_a_torch_module_with_convolutions_takes_an_empty_batch(batch, settings):
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(-3), torch.nn.Linear(8, 1))
    parameters = dict(model.named_parameters())

    def loss(parameters, image):
        out = torch.func.functional_call(model, parameters, (image,))
        return out.square().sum().sqrt(), out.reshape(-1)

    clipped = gradclip.clipped_grad(loss, 1.0, has_aux=True, return_values=True, return_norms=True, **settings)
    summed, outputs = clipped(parameters, batch)
    assert {name: tuple(x.shape) for name, x in summed.items()} == {n: tuple(p.shape) for n, p in parameters.items()}
    assert not any(x.any() for x in summed.values())
    assert [outputs.values.shape[0], outputs.norms.shape[0], outputs.aux.shape[0]] == [0, 0, 0]


def test_options_reach_per_example_clip():
    clipped = gradclip.clipped_grad(lambda p, x: (p * x).sum(), 1.0, nonfinite="propagate")
    assert np.isnan(clipped(jnp.ones(2), jnp.array([[1.0, np.nan], [1.0, 1.0]]))).all()
    clipped = gradclip.clipped_grad(lambda p, x: (p * x).sum(), 1.0, nonfinite="raise")
    with pytest.raises(FloatingPointError):
        clipped(torch.ones(2), torch.tensor([[1.0, np.nan]]))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"argnums": ()}, ValueError, "argnums must not be empty"),
        ({"argnums": -1}, ValueError, "argnums must be positions counted from 0, got -1"),
        ({"batch_argnums": -1}, ValueError, "batch_argnums must be positions counted from 0"),
        ({"batch_argnums": ()}, ValueError, "batch_argnums must not be empty"),
        ({"argnums": 1}, ValueError, r"overlap in \[1\]"),
        ({"prng_argnum": 0}, ValueError, "a key has no gradient"),
        ({"prng_argnum": 1}, ValueError, "not in batch_argnums"),
        ({"prng_argnum": -1}, ValueError, "prng_argnum=-1 must be >= 0"),
        ({"normalize_by": 0.0}, ValueError, "normalize_by must be positive and finite"),
        ({"normalize_by": math.nan}, ValueError, "normalize_by must be positive and finite"),
        ({"normalize_by": "2"}, TypeError, "normalize_by must be a number"),
        ({"microbatch_size": 0}, ValueError, "microbatch_size must be a whole number, 1 or more"),
        ({"microbatch_size": 2.5}, ValueError, "microbatch_size must be a whole number, 1 or more"),
        ({"microbatch_size": "2"}, TypeError, "microbatch_size must be a whole number, 1 or more"),
        ({"max_norm": -1.0}, ValueError, "must not be negative or NaN"),
        ({"nonfinite": "ignore"}, ValueError, "nonfinite"),
        ({"unit": "user"}, ValueError, "unit must be 'example' or 'group'"),
    ],
)
def test_bad_settings(settings, error, message):
    with pytest.raises(error, match=message):
        gradclip.clipped_grad(loss, **({"max_norm": 1.0} | settings))


def test_bad_calls():
    clipped = gradclip.clipped_grad(loss, 1.0, batch_argnums=(1, 2))
    with pytest.raises(ValueError, match=r"argument 1\['x'\] \(3, 2\), argument 2 \(2,\)"):
        clipped(jnp.ones(2), {"x": jnp.ones((3, 2))}, jnp.ones(2))
    with pytest.raises(ValueError, match=r"argument 1 \(\), argument 2 \(2,\)\. Give each a row for each example"):
        clipped(jnp.ones(2), jnp.ones(()), jnp.ones(2))
    with pytest.raises(ValueError, match=r"argument 1 is 1\.0 of type float, not an array with the batch on axis 0"):
        clipped(jnp.ones(2), 1.0, jnp.ones(2))
    for mask in (np.ones(3, bool), np.ones((2, 1), bool), [True]):
        with pytest.raises(ValueError, match="mask"):
            clipped(jnp.ones(2), jnp.ones((2, 2)), jnp.ones(2), mask=mask)
    with pytest.raises(TypeError, match="argument 2 must be passed by position"):
        clipped(jnp.ones(2), jnp.ones(2))
    with pytest.raises(TypeError, match="argument 0 holds NumPy arrays, which gradclip cannot differentiate"):
        clipped({"w": np.ones(2)}, jnp.ones(2), jnp.ones(2))
    with pytest.raises(ValueError, match="prng_argnum is for JAX"):
        gradclip.clipped_grad(loss, 1.0, prng_argnum=2)(torch.ones(2), torch.ones(3, 2), 0)
