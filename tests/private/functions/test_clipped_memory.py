"""Memory of `clipped_grad`: with a fixed microbatch it does not grow with the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip


def rows_of(count):
    return np.random.default_rng(count).normal(size=(count, 64)).astype(np.float32)


def bytes_of_jax(batch, microbatch_size, method="materialize"):
    loss = lambda p, x: jnp.tanh(x @ p).sum()
    clipped = gradclip.clipped_grad(loss, 1.0, microbatch_size=microbatch_size, method=method)
    compiled = jax.jit(clipped).lower(jnp.ones((64, 64)), jnp.asarray(rows_of(batch))).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def bytes_of_torch(batch, microbatch_size, method="materialize"):
    """Return the most that PyTorch's allocator had handed out at a time."""
    loss = lambda p, x: torch.tanh(x @ p).sum()
    clipped = gradclip.clipped_grad(loss, 1.0, microbatch_size=microbatch_size, method=method)
    parameters, rows = torch.ones(64, 64), torch.from_numpy(rows_of(batch))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        clipped(parameters, rows)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]))


GRADIENT = 64 * 64 * 4


@pytest.mark.parametrize("bytes_of", [bytes_of_jax, bytes_of_torch])
def test_temporary_memory_does_not_grow_with_the_batch(bytes_of):
    few, many, uneven = (bytes_of(batch, microbatch_size=16) for batch in (64, 512, 515))
    assert 16 * GRADIENT <= few == many < 20 * GRADIENT
    # A batch that the microbatches do not divide is counted off: some bytes for each example, not its gradient.
    assert uneven - many <= 8 * 515


@pytest.mark.parametrize("bytes_of", [bytes_of_jax, bytes_of_torch])
def test_without_microbatches_it_grows_by_the_gradient_of_each_example(bytes_of):
    assert bytes_of(512, microbatch_size=None) - bytes_of(64, microbatch_size=None) >= 448 * GRADIENT


@pytest.mark.parametrize("bytes_of", [bytes_of_jax, bytes_of_torch])
def test_with_factors_it_grows_by_rows_only(bytes_of):
    few, many = (bytes_of(batch, None, method="ghost") for batch in (64, 512))
    # Some arrays of 64 numbers for each example. Its gradient has 64 * 64.
    assert many - few <= 448 * 12 * 64 * 4
