"""Under JAX' strict promotion of dtypes: gradclip's own arithmetic on mixed trees neither raises nor changes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import sparse

import gradclip
from gradclip.integrations import optax as ours

ROWS = jnp.linspace(-2.0, 3.0, 12).reshape(3, 4)
TREE = {"a": ROWS, "b": jnp.asarray(ROWS[:, :2], jnp.bfloat16), "c": jnp.asarray(ROWS[:, 0], jnp.float16)}
CALLS = {
    "global": lambda t, c: gradclip.clip_by_global_norm(t, c)[0],
    "global, 3": lambda t, c: gradclip.clip_by_global_norm(t, c, ord=3, nonfinite="zero")[0],
    "layer": lambda t, c: gradclip.clip_by_layer_norm(t, {"a": c, "b": 2 * c, "c": 3 * c})[0],
    "norms": lambda t, c: gradclip.layer_norms(t),
    "value": lambda t, c: gradclip.clip_by_value(t, c),
    "unit": lambda t, c: gradclip.clip_by_unit_norm(t, c),
    "agc": lambda t, c: gradclip.adaptive_grad_clip(t, t, clipping=c),
    "examples": lambda t, c: gradclip.per_example_clip(t, c, mask=np.array([True, False, True]))[0],
    "rule": lambda t, c: gradclip.per_example_clip(t, c, rule="automatic")[0],
    "rms": lambda t, c: ours.clip_by_block_rms(c).update(t, None)[0],
}


def total(tree):
    return sum(jnp.sum(x.astype(jnp.float32) * (i + 1)) for i, x in enumerate(jax.tree.leaves(tree)))


def programs(call):
    """Return the programs that JAX traces: the call's own, and those of its derivatives."""
    of_both = lambda t, c: total(call(t, c))
    yield jax.jit(call).lower(TREE, jnp.float32(0.5)).as_text()
    yield jax.jit(jax.grad(of_both, argnums=(0, 1))).lower(TREE, jnp.float32(0.5)).as_text()
    yield jax.jit(lambda t: jax.jvp(lambda t: of_both(t, 0.5), (t,), (t,))).lower(TREE).as_text()


@pytest.mark.parametrize("name", CALLS)
def test_results_and_programs_are_those_without_it(name):
    call = CALLS[name]
    expected, traced = call(TREE, 0.5), list(programs(call))
    with jax.numpy_dtype_promotion("strict"):
        made, again = call(TREE, 0.5), list(programs(call))
    assert again == traced
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one, np.float64), np.asarray(other, np.float64))


PIECES = jnp.array([[2], [0], [2], [4]])


@pytest.mark.parametrize(("dtype", "max_norm"), [("float16", 0.5), ("bfloat16", 100.0)])
def test_sparse_arrays_are_those_without_it(dtype, max_norm):
    values = jnp.array([1.5, -2.0, 3.25, 0.5], dtype)

    def call(values):
        tree = {"sparse": sparse.BCOO((values, PIECES), shape=(5,)), "dense": ROWS}
        return gradclip.clip_by_global_norm(tree, max_norm)[0]["sparse"].data

    def results():
        return call(values), *jax.jit(lambda x: (call(x), jax.grad(lambda x: total(call(x)))(x)))(values)

    expected = results()
    with jax.numpy_dtype_promotion("strict"):
        made = results()
    for one, other in zip(made, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float64), np.asarray(other, np.float64))


TRANSFORMATIONS = {
    "adaptive": lambda: ours.adaptive_clip_by_global_norm(skip_above=3.0, nonfinite="drop"),
    "injected": lambda: optax.inject_hyperparams(ours.adaptive_clip_by_global_norm)(skip_above=3.0),
    "spikes": lambda: ours.skip_spikes(optax.sgd(1.0)),
    "state": lambda: ours.clip_by_global_norm_with_state(1.0),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformations_of_optax(name, dtype):
    tree = {"a": ROWS.astype(dtype)}
    with jax.numpy_dtype_promotion("strict"):
        transform = TRANSFORMATIONS[name]()
        state = transform.init(tree)
        for update in (transform.update, jax.jit(transform.update)):
            made, state = update(tree, state, tree)
            assert made["a"].dtype == tree["a"].dtype


def test_the_users_function_keeps_the_users_mode():
    mixing = lambda w, x: (x.astype(jnp.bfloat16) * w).sum()
    for method in ("materialize", "loop"):
        clipped = gradclip.clipped_grad(mixing, 1.0, method=method)
        with jax.numpy_dtype_promotion("strict"), pytest.raises(ValueError, match="promotion"):
            clipped(jnp.ones(4), ROWS)
