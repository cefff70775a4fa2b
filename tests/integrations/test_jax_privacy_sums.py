"""`clipped_grad` and `clipped_fun` of `jax_privacy.clipping`, beside the library's own on the same inputs."""

import inspect
import math

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_privacy import clipping as peer

from gradclip.integrations import jax_privacy as ours

# The peer calls a function that its own dependency calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning:optax")

BATCH = 6
PADDING = np.array([False, True, False, False, True, True])
PARAMS = {"w": jnp.arange(6.0).reshape(3, 2) / 4.0, "b": jnp.array([0.5, -1.0])}
X = jax.random.normal(jax.random.key(0), (BATCH, 3))
Y = jax.random.normal(jax.random.key(1), (BATCH, 2))

SETTINGS = [
    {},
    {"rescale_to_unit_norm": True},
    {"normalize_by": 4.0},
    {"microbatch_size": 2},
    {"microbatch_size": 3, "rescale_to_unit_norm": True, "normalize_by": 2.0, "return_grad_norms": True},
    {"return_grad_norms": True},
    {"nan_safe": False},
    {"dtype": jnp.float32},
    {"keep_batch_dim": False},
    {"pre_clipping_transform": lambda g: {"w": g["w"] / 2.0}, "return_grad_norms": True},
]


def loss(params, x, y):
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def loss_with_aux(params, x, y):
    out = x @ params["w"] + params["b"]
    return jnp.mean((out - y) ** 2), {"out": out}


def both(name, call, *args, **kwargs):
    """Return what theirs and ours make of the same, ours second.

    Theirs is compiled: one program takes less time than each of its operations alone.
    """
    theirs, mine = (getattr(module, name)(*args, **kwargs) for module in (peer, ours))
    return [call(jax.jit(theirs)), call(mine)]


def same(theirs, mine):
    assert [x.dtype for x in jax.tree.leaves(theirs)] == [x.dtype for x in jax.tree.leaves(mine)]
    assert [x.shape for x in jax.tree.leaves(theirs)] == [x.shape for x in jax.tree.leaves(mine)]
    for their, my in zip(jax.tree.leaves(theirs), jax.tree.leaves(mine), strict=True):
        np.testing.assert_allclose(my, their, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ["clipped_fun", "clipped_grad"])
def test_signature(name):
    theirs, mine = (list(inspect.signature(getattr(module, name)).parameters.values()) for module in (peer, ours))
    added = [mine.pop() for _ in range(len(mine) - len(theirs))][::-1]
    # The grid is jax-privacy's since 2.2.
    own = {"clipped_fun": [("grid_scale", None)], "clipped_grad": [("grid_scale", None), ("method", "materialize")]}
    assert [(p.name, p.default) for p in added] == own[name]
    assert all(p.kind is p.KEYWORD_ONLY for p in added)
    assert [(p.name, p.kind) for p in mine] == [(p.name, p.kind) for p in theirs]
    for their, my in zip(theirs, mine, strict=True):
        assert my.default == their.default or (callable(my.default) and my.default(3) == their.default(3))


# Padding and compiling together, and neither, without settings: each setting is met by both.
@pytest.mark.parametrize(
    ("settings", "padded", "jit"),
    [({}, False, False), ({}, True, True)]
    + [(settings, padded, not padded) for settings in SETTINGS for padded in (False, True)],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else str(value),
)
def test_clipped_grad(settings, padded, jit):
    def call(clipped):
        arguments = {"is_padding_example": PADDING} if padded else {}
        return (jax.jit(clipped) if jit else clipped)(PARAMS, X, Y, **arguments)

    theirs, mine = both("clipped_grad", call, loss, l2_clip_norm=1.0, batch_argnums=(1, 2), **settings)
    if padded and "return_grad_norms" in settings:  # what padding has for a norm is up to each
        theirs, mine = ((s, o.grad_norms[~PADDING]) for s, o in (theirs, mine))
    same(theirs, mine)


def test_outputs_of_each_example():
    settings = {"has_aux": True, "return_values": True, "return_grad_norms": True, "microbatch_size": 2}
    (their_sum, their_outputs), (my_sum, my_outputs) = both(
        "clipped_grad", lambda f: f(PARAMS, X, Y), loss_with_aux, l2_clip_norm=1.0, batch_argnums=(1, 2), **settings
    )
    same(their_sum, my_sum)
    for field in ("values", "grad_norms", "aux"):
        same(getattr(their_outputs, field), getattr(my_outputs, field))


def test_norms_show_a_bad_example():
    x = X.at[2, 0].set(math.nan)
    theirs, mine = both(
        "clipped_grad",
        lambda f: f(PARAMS, x, Y),
        loss,
        l2_clip_norm=1.0,
        batch_argnums=(1, 2),
        return_grad_norms=True,
    )
    same(theirs[0], mine[0])
    assert np.isnan(theirs[1].grad_norms).tolist() == np.isnan(mine[1].grad_norms).tolist()


def test_numbers_as_parameters_and_several_of_them():
    def fun(p, x, q):
        return p["a"] * jnp.sum(x) + q * jnp.mean(x**2)

    theirs, mine = both(
        "clipped_grad", lambda f: f({"a": 2.5}, np.arange(4.0, dtype=np.float32), 1.0), fun, (0, 2), l2_clip_norm=1.5
    )
    same(theirs, mine)


def test_keys_and_keyword_arguments_of_each_example():
    def fun(params, x, key, *, weight):
        return weight * jnp.sum(params * x * jax.random.bernoulli(key, shape=x.shape))

    def call(clipped):
        return jax.jit(clipped)(jnp.ones(3), X, jax.random.key(3), weight=jnp.arange(6.0))

    same(*both("clipped_grad", call, fun, l2_clip_norm=1.0, prng_argnum=2))
    same(*both("clipped_grad", call, fun, l2_clip_norm=1.0, prng_argnum=2, microbatch_size=3))


def test_users():
    def call(clipped):
        return clipped(PARAMS, X.reshape(3, 2, 3), Y.reshape(3, 2, 2))

    same(*both("clipped_grad", call, loss, l2_clip_norm=0.5, batch_argnums=(1, 2), keep_batch_dim=False))


@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.parametrize("return_norms", [False, True])
@pytest.mark.parametrize("microbatch_size", [None, 2])
@pytest.mark.parametrize("rescale", [False, True])
def test_clipped_fun(has_aux, return_norms, microbatch_size, rescale):
    def fun(x):
        return (x.mean(0), {"rows": x, "total": x.sum()}) if has_aux else x.mean(0)

    theirs, mine = both(
        "clipped_fun",
        lambda f: f(X),
        fun,
        has_aux,
        l2_clip_norm=0.5,
        rescale_to_unit_norm=rescale,
        return_norms=return_norms,
        microbatch_size=microbatch_size,
    )
    if return_norms and not has_aux:  # documented as a pair of sum and norms; the library returns (sum, ((), norms))
        theirs = (theirs[0], theirs[1][1])
    assert jax.tree.structure(theirs) == jax.tree.structure(mine)
    same(theirs, mine)


@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.float16])
@pytest.mark.parametrize("given", ["float16", "bfloat16", "float32"])
def test_dtypes(given, dtype):
    theirs, mine = both("clipped_fun", lambda f: f(X.astype(given)), lambda x: x[0], dtype=dtype)
    assert mine.dtype == theirs.dtype == (dtype or given)
    np.testing.assert_allclose(np.float32(mine), np.float32(theirs), rtol=0.05, atol=0.05)


def test_sensitivity():
    relation = dp_accounting.NeighboringRelation
    for settings in ({}, {"rescale_to_unit_norm": True}, {"normalize_by": 8.0}):
        theirs, mine = (module.clipped_grad(loss, l2_clip_norm=3.0, **settings) for module in (peer, ours))
        assert [mine.sensitivity(r) for r in relation] == [theirs.sensitivity(r) for r in relation]
        assert mine.sensitivity() == theirs.sensitivity() == mine.l2_norm_bound == theirs.l2_norm_bound
        assert mine.has_aux is theirs.has_aux is False
        assert mine.clipped.sensitivity("zero_out").bound == mine.l2_norm_bound
    assert ours.clipped_fun(loss, return_norms=True).has_aux is True
    with pytest.raises(ValueError, match="neighboring_relation must be one of ADD_OR_REMOVE_ONE"):
        ours.clipped_fun(loss).sensitivity("replace")


def test_a_batch_need_not_be_a_multiple_of_the_microbatch():
    whole, parts = (
        ours.clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2), microbatch_size=size)(PARAMS, X, Y)
        for size in (None, 4)
    )
    same(whole, parts)


def test_errors():
    for settings in ({"argnums": 1}, {"batch_argnums": ()}, {"batch_argnums": -1}, {"normalize_by": 0.0}):
        for module in (peer, ours):
            with pytest.raises(ValueError, match=r"(?i)batch|must be"):
                module.clipped_grad(loss, l2_clip_norm=1.0, **settings)
    for module in (peer, ours):
        with pytest.raises(ValueError, match=r"[Bb]atch"):
            module.clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2))(PARAMS, X, Y[:3])


@pytest.mark.parametrize(
    ("threshold", "error", "message"),
    [
        (-1.0, ValueError, "not be negative"),
        (None, TypeError, "a real number .*, got None"),
        ("big", TypeError, "a real number .*, got 'big'"),
        ([1.0, "big"], TypeError, "a real number .*, got 'big'"),
    ],
)
def test_thresholds_are_called_l2_clip_norm(threshold, error, message):
    for make in (ours.clipped_grad, ours.clipped_fun):
        with pytest.raises(error, match=f"^l2_clip_norm must (be )?{message}"):
            make(loss, l2_clip_norm=threshold)
        with pytest.raises(ValueError, match=r"^l2_clip_norm holds no thresholds, got \{\}"):
            make(loss, l2_clip_norm={})


@pytest.mark.parametrize("method", ["materialize", "auto"])
def test_no_batch_argument_is_an_error_as_in_jax_privacy(method):
    with pytest.raises(TypeError, match=r"batch_argnums must be one or several positions, got None"):
        ours.clipped_grad(lambda w, x: jnp.sum(w * x), l2_clip_norm=1.0, batch_argnums=None, method=method)
    with pytest.raises(TypeError, match=r"batch_argnums must be one or several positions, got None"):
        ours.clipped_fun(jnp.sum, l2_clip_norm=1.0, batch_argnums=None)
