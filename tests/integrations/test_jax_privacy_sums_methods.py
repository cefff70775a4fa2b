"""`clipped_grad` with `method=`, beside jax_privacy's own on the same inputs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_privacy import clipping as peer

from gradclip.integrations import jax_privacy as ours

# The peer calls a function that its own dependency calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning:optax")

BATCH, WORDS, WIDTH = 8, 300, 320
PADDING = np.array([False, True, False, False, True, False, False, True])
KEYS = jax.random.split(jax.random.key(0), 4)
PARAMS = {
    "embedding": jax.random.normal(KEYS[0], (WORDS, WIDTH)) / 8.0,
    "dense": jax.random.normal(KEYS[1], (WIDTH, WIDTH)) / 16.0,
    "bias": jnp.linspace(-1.0, 1.0, WIDTH),
}
X = jax.random.randint(KEYS[2], (BATCH, 3), 0, WORDS)
Y = jax.random.normal(KEYS[3], (BATCH, WIDTH)) * jnp.arange(1.0, BATCH + 1.0)[:, None]


def loss(params, x, y):
    hidden = jnp.tanh(params["embedding"][x].sum(-2))
    return jnp.mean((hidden @ params["dense"] + params["bias"] - y) ** 2)


def loss_with_aux(params, x, y):
    value = loss(params, x, y)
    return value, {"twice": 2.0 * value, "rows": params["embedding"][x].sum(-1)}


def both(call, *args, method="ghost", **kwargs):
    """Return what jax_privacy and ours make of the same, ours second. Some of ours must not be made.

    That of jax_privacy is compiled: one program takes less time than each of its operations alone.
    """
    kwargs = {"l2_clip_norm": 0.5, "batch_argnums": (1, 2)} | kwargs
    mine = ours.clipped_grad(*args, method=method, **kwargs)
    made = call(mine)
    return call(jax.jit(peer.clipped_grad(*args, **kwargs))), made


def same(theirs, mine):
    for their, my in zip(jax.tree.leaves(theirs), jax.tree.leaves(mine), strict=True):
        assert (their.dtype, their.shape) == (my.dtype, my.shape)
        np.testing.assert_allclose(np.float32(my), np.float32(their), rtol=2e-6, atol=2e-7)


def test_large_parameters_come_in_factors():
    plan = ours.clipped_grad(loss, l2_clip_norm=0.5, batch_argnums=(1, 2), method="ghost").clipped.plan(PARAMS, X, Y)
    assert [leaf.how for leaf in plan.leaves] == ["autograd", "ghost", "ghost"]


@pytest.mark.parametrize(
    ("padded", "jit", "method"), [(True, False, "ghost"), (False, True, "ghost"), (True, True, "auto")]
)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rescale_to_unit_norm": True, "normalize_by": 4.0},
        {"microbatch_size": 4, "return_grad_norms": True},
        {"return_values": True, "keep_batch_dim": False},
        {"dtype": jnp.float32},
        {"nan_safe": False},
    ],
    ids="+".join,
)
def test_what_jax_privacy_gives(settings, padded, jit, method):
    def call(clipped):
        arguments = {"is_padding_example": PADDING} if padded else {}
        return (jax.jit(clipped) if jit else clipped)(PARAMS, X, Y, **arguments)

    theirs, mine = both(call, loss, method=method, **settings)
    if padded and isinstance(theirs, tuple):  # what padding has for outputs is up to each
        theirs, mine = ((s, jax.tree.map(lambda x: x[~PADDING], tuple(o))) for s, o in (theirs, mine))
    same((theirs,), (mine,))


def test_a_narrow_dtype_rounds_the_sum_once():
    settings = {"l2_clip_norm": 0.5, "batch_argnums": (1, 2), "method": "ghost"}
    narrow, wide = (ours.clipped_grad(loss, **settings, dtype=dtype)(PARAMS, X, Y) for dtype in (jnp.bfloat16, None))
    for my, exact in zip(jax.tree.leaves(narrow), jax.tree.leaves(wide), strict=True):
        assert (my.dtype, exact.dtype) == (jnp.bfloat16, jnp.float32)
        np.testing.assert_array_equal(np.float32(my), np.float32(exact.astype(jnp.bfloat16)))


def test_outputs_of_each_example():
    settings = {"has_aux": True, "return_values": True, "return_grad_norms": True, "microbatch_size": 4}
    (their_sum, theirs), (my_sum, mine) = both(lambda f: f(PARAMS, X, Y), loss_with_aux, **settings)
    same((their_sum,), (my_sum,))
    assert isinstance(mine, ours.AuxiliaryOutput)
    for field in ("values", "grad_norms", "aux"):
        same((getattr(theirs, field),), (getattr(mine, field),))


def test_several_arguments_keys_and_keyword_arguments_of_each_example():
    def fun(dense, x, scale, key, *, weight):
        kept = jnp.where(jax.random.bernoulli(key, shape=x.shape), x, 0.0)
        return jnp.sum(weight * scale * (kept @ dense) ** 2)

    def call(clipped):
        return jax.jit(clipped)(PARAMS["dense"], Y, jnp.float32(0.5), jax.random.key(3), weight=jnp.arange(8.0))

    settings = {"argnums": (0, 2), "batch_argnums": 1, "prng_argnum": 3}
    same(*both(call, fun, **settings))
    same(*both(call, fun, **settings, microbatch_size=4))


def test_numbers_as_parameters():
    def fun(p, x, q):
        return p["a"] * jnp.sum(x) + q * jnp.mean(x**2)

    same(*both(lambda f: f({"a": 2.5}, Y, 1.0), fun, argnums=(0, 2), batch_argnums=1, method="auto"))


def test_a_tree_of_thresholds():
    thresholds = {"embedding": 0.1, "dense": 0.2, "bias": 0.3}

    def fun(clipped):
        return clipped(PARAMS, X, Y)

    for settings in ({"nan_safe": False, "return_grad_norms": True}, {"return_grad_norms": True}):
        made, planned = (
            ours.clipped_grad(loss, l2_clip_norm=thresholds, batch_argnums=(1, 2), method=method, **settings)
            for method in ("materialize", "auto" if "nan_safe" not in settings else "ghost")
        )
        same(made(PARAMS, X, Y), planned(PARAMS, X, Y))
        assert made.sensitivity() == planned.sensitivity()


def test_an_example_with_nan_is_left_out():
    y, left_out = Y.at[2, 0].set(math.nan), np.arange(BATCH) == 2
    clipped = ours.clipped_grad(loss, l2_clip_norm=0.5, batch_argnums=(1, 2), method="ghost", return_grad_norms=True)
    summed, outputs = clipped(PARAMS, X, y)
    assert np.isnan(outputs.grad_norms).tolist() == left_out.tolist()
    same((clipped(PARAMS, X, Y, is_padding_example=left_out)[0],), (summed,))
    spoiled = ours.clipped_grad(loss, l2_clip_norm=0.5, batch_argnums=(1, 2), method="ghost", nan_safe=False)
    assert all(np.isnan(x).all() for x in jax.tree.leaves(spoiled(PARAMS, X, y)))
    assert spoiled.sensitivity() == math.inf


def test_the_sensitivity_is_that_of_jax_privacy_and_counts_what_factors_round():
    made, planned = (
        ours.clipped_grad(loss, l2_clip_norm=3.0, batch_argnums=(1, 2), normalize_by=8.0, method=method)
        for method in ("materialize", "ghost")
    )
    theirs = peer.clipped_grad(loss, l2_clip_norm=3.0, batch_argnums=(1, 2), normalize_by=8.0)
    assert planned.sensitivity() == planned.l2_norm_bound == theirs.sensitivity() == 0.375
    one, other = (f.clipped.sensitivity("zero_out", batch_size=256) for f in (made, planned))
    assert other.bound == one.bound
    assert other.rounding > one.rounding


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"pre_clipping_transform": lambda g: g}, "pre_clipping_transform= changes them"),
        ({"spmd_axis_name": "batch"}, "spmd_axis_name= is for jax.vmap over them"),
        ({"l2_clip_norm": {"w": 1.0}}, "nan_safe=True with a tree of thresholds searches all of them for NaN"),
    ],
)
def test_settings_that_need_gradients(settings, reason):
    settings = {"l2_clip_norm": 1.0} | settings
    with pytest.raises(ValueError, match=rf"method='ghost' makes no .* but {reason}. Pass method='auto'."):
        ours.clipped_grad(loss, method="ghost", **settings)
    assert ours.clipped_grad(lambda w, x: w["w"] * x, method="auto", **settings).clipped.argnums is None


def test_a_grid_needs_gradients():
    with jax.enable_x64(True):
        with pytest.raises(ValueError, match=r"method='ghost' makes no .* but grid_scale= rounds them"):
            ours.clipped_grad(loss, l2_clip_norm=1.0, grid_scale=100, method="ghost")
        clipped = ours.clipped_grad(loss, l2_clip_norm=1.0, grid_scale=100, method="auto")
    assert clipped.clipped.argnums is None


def test_transformed_gradients_are_those_of_jax_privacy():
    settings = {"pre_clipping_transform": lambda g: {"dense": g["dense"] / 2.0}, "return_grad_norms": True}
    (their_sum, theirs), (my_sum, mine) = both(lambda f: f(PARAMS, X, Y), loss, method="auto", **settings)
    same((their_sum, theirs.grad_norms), (my_sum, mine.grad_norms))


def test_other_methods_are_an_error():
    for method in ("loop", "vmap"):
        with pytest.raises(ValueError, match=rf"method must be .*'materialize', 'auto'.*'ghost'.*{method}"):
            ours.clipped_grad(loss, l2_clip_norm=1.0, method=method)
