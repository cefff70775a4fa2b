"""Sums on the grid of jax-privacy 2.2: integers, whose exact norm is at most the number of steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradclip.integrations.jax_privacy import clip_and_round_to_grid, clipped_fun, clipped_grad


@pytest.fixture(autouse=True)
def _wide():
    with jax.enable_x64(True):
        yield


def square_of(tree):
    return sum(int(v) ** 2 for leaf in jax.tree.leaves(tree) for v in np.ravel(leaf))


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: jax.jit(f, static_argnums=(1, 2))], ids=["eager", "jit"])
@pytest.mark.parametrize(("max_norm", "steps", "elements"), [(1.0, 1000, 100), (5.0, 500, 1000), (0.1, 16, 1000)])
def test_the_norm_of_the_integers_is_at_most_the_steps(wrap, max_norm, steps, elements):
    rng = np.random.default_rng(0)
    for scale in (1e-3, 1.0, 1e30):
        tree = {"w": jnp.asarray(rng.normal(size=elements - 1) * scale), "b": jnp.asarray(scale)}
        rounded, norm = wrap(clip_and_round_to_grid)(tree, max_norm, steps)
        assert {x.dtype for x in jax.tree.leaves(rounded)} == {jnp.dtype("int64")}
        assert square_of(rounded) <= steps**2
        assert norm.dtype == jnp.float32
        if scale > 1:
            assert square_of(rounded) >= max(0.0, steps - np.sqrt(elements)) ** 2


def test_all_components_that_round_up_stay_within_the_steps():
    """Sixteen components of 2.5 steps and a bit have norm 10 and a bit, and round to 3 each: norm 12."""
    rounded, _ = clip_and_round_to_grid(jnp.full(16, 2.5001), 10.01, 10)
    assert square_of(rounded) <= 100


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_that_is_not_finite_becomes_zeros(bad):
    rounded, norm = clip_and_round_to_grid([jnp.array([3.0, bad])], 1.0, 100)
    assert rounded[0].tolist() == [0, 0]
    assert not np.isfinite(norm)


def test_over_a_batch():
    rows = jnp.array([[0.3, -0.4], [3.0, 4.0]])
    rounded, norms = jax.vmap(lambda x: clip_and_round_to_grid(x, 1.0, 1000))(rows)
    assert rounded[0].tolist() == [300, -400]
    assert [abs(v - w) <= 1 for v, w in zip(rounded[1].tolist(), [600, 800], strict=True)] == [True, True]
    assert norms.tolist() == [0.5, 5.0]


@pytest.mark.parametrize("microbatch_size", [None, 2])
@pytest.mark.parametrize("jit", [False, True])
def test_sums_are_those_of_the_rounded_examples(microbatch_size, jit):
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(5, 4)))
    loss = lambda w, x: jnp.sum(w * x)
    made = clipped_grad(
        loss, l2_clip_norm=2.0, grid_scale=500, keep_batch_dim=False, microbatch_size=microbatch_size, dtype=jnp.float32
    )
    padding = jnp.array([False, False, True, False, False])
    found = (jax.jit(made) if jit else made)(jnp.zeros(4), rows, is_padding_example=padding)
    each = [clip_and_round_to_grid(row, 2.0, 500)[0] for row in rows]
    assert found.dtype == jnp.int64
    assert found.tolist() == sum(each[i] for i in (0, 1, 3, 4)).tolist()
    assert (made.l2_norm_bound, made.sensitivity()) == (500.0, 500.0)
    # In units of the gradients, and without rounding.
    assert (made.clipped.sensitivity("zero_out").bound, made.clipped.sensitivity("zero_out").rounding) == (2.0, 0.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rescale_to_unit_norm": True}, "Leave out rescale_to_unit_norm and normalize_by"),
        ({"normalize_by": 2.0}, "Leave out rescale_to_unit_norm and normalize_by"),
        ({"l2_clip_norm": {"a": 1.0}}, "needs one number as l2_clip_norm"),
        ({"nan_safe": False}, "sums on a grid are integers"),
        ({"grid_scale": 0}, "from 1 to 2\\*\\*52, got 0"),
        ({"grid_scale": 10.0}, "from 1 to 2\\*\\*52, got 10.0"),
        ({"l2_clip_norm": 0.0}, "must be positive and finite"),
    ],
)
@pytest.mark.parametrize("make", [clipped_fun, clipped_grad])
def test_settings_that_integers_do_not_have(make, settings, words):
    with pytest.raises(ValueError, match=words):
        make(lambda w, x: jnp.sum(w * x), **{"l2_clip_norm": 1.0, "grid_scale": 1000} | settings)


def test_a_grid_too_coarse_is_named_with_the_smallest_that_works():
    with pytest.raises(ValueError, match=r"too coarse for 10000 elements.*The smallest grid that works is 51"):
        clip_and_round_to_grid(jnp.ones(10000), 1.0, 1)


def test_64_bit_mode_is_asked_for():
    with jax.enable_x64(False):
        for call in (
            lambda: clip_and_round_to_grid(jnp.ones(3), 1.0, 1000),
            lambda: clipped_fun(lambda x: x, grid_scale=1000),
        ):
            with pytest.raises(ValueError, match="grid_scale needs 64-bit integers"):
                call()
