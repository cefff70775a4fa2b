"""Which arguments are parameters and which carry the batch: positions, and arrays of one framework."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip


def loss(w, x):
    return (w * x).sum()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"fun": 3}, TypeError, "fun must be a function, got 3 of type int"),
        ({"prng_argnum": "a"}, ValueError, "prng_argnum='a' must be >= 0"),
        ({"prng_argnum": 2.0}, ValueError, "prng_argnum=2.0 must be >= 0"),
        ({"batch_argnums": 1.0}, TypeError, "batch_argnums must be one or several positions, got 1.0"),
        ({"batch_argnums": (1, 1)}, ValueError, "batch_argnums names a position twice"),
        ({"argnums": None}, TypeError, "argnums must be one or several positions, got None"),
        ({"argnums": [0, 0]}, ValueError, "argnums names a position twice"),
        ({"microbatch_size": 1.5}, ValueError, "microbatch_size must be a whole number, 1 or more, got 1.5"),
        ({"pad_to": "8"}, TypeError, "pad_to must be a whole number, 1 or more, got '8' of type str"),
    ],
)
def test_positions_and_counts_are_whole_numbers(settings, error, message):
    with pytest.raises(error, match=message):
        gradclip.clipped_grad(**({"fun": loss, "max_norm": 1.0} | settings))


def test_scalars_of_numpy_are_positions():
    made = gradclip.clipped_grad(loss, 1.0, argnums=np.int64(0), batch_argnums=np.int64(1), microbatch_size=np.int64(2))
    assert made(jnp.zeros(2), jnp.array([[0.3, 0.4]])).tolist() == pytest.approx([0.3, 0.4])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (None, torch.ones(4, 3)),
            "argument 0 must hold the parameters, in arrays of PyTorch, JAX or TensorFlow, got None",
        ),
        (
            ("w", torch.ones(4, 3)),
            "argument 0 must hold the parameters, in arrays of PyTorch, JAX or TensorFlow, got 'w'",
        ),
        ((jnp.zeros(3), torch.ones(4, 3)), "argument 1 holds arrays of torch, but the parameters are of jax"),
        ((torch.zeros(3), jnp.ones((4, 3))), "argument 1 holds arrays of jax, but the parameters are of torch"),
    ],
)
def test_parameters_and_batch_are_arrays_of_one_framework(arguments, message):
    with pytest.raises(TypeError, match=message):
        gradclip.clipped_grad(loss, 1.0)(*arguments)


@pytest.mark.parametrize("arguments", [(torch.zeros(3), torch.ones(4, 3)), (jnp.zeros(3), jnp.ones((4, 3)))])
def test_a_function_without_auxiliary_results_is_named(arguments):
    with pytest.raises(TypeError, match=r"with has_aux=True fun must return a pair, \(value, aux\), got a"):
        gradclip.clipped_grad(loss, 1.0, has_aux=True)(*arguments)
