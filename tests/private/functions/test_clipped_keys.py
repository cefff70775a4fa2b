"""Random keys: each place of a batch has its own, whatever the number of examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

import gradclip

SETTINGS = [{}, {"pad_to": 7}, {"microbatch_size": 2}, {"microbatch_size": 1}, {"method": "loop"}]


def draws(framework, settings, count, mask=None):
    """Return what each place draws."""
    if framework == "tensorflow":
        key, array = tf.constant([3, 5]), tf.ones
        draw = lambda key: tf.random.stateless_uniform([], key)
    else:
        key, array = jax.random.key(3) if framework == "jax" else jax.random.PRNGKey(3), jnp.ones
        draw = lambda key: jax.random.uniform(key)

    def loss(w, x, key):
        drawn = draw(key)
        return (w * x)[0, 0] * drawn, drawn

    clipped = gradclip.clipped_grad(loss, 100.0, has_aux=True, prng_argnum=2, **settings)
    return np.asarray(clipped(array([1, 1]), array([count, 1]), key, mask=mask)[1].aux).tolist()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("framework", ["jax", "jax before keys", "tensorflow"])
def test_a_key_depends_on_its_place_alone(framework, settings):
    five = draws(framework, settings, 5)
    assert len({*five}) == 5
    assert draws(framework, settings, 3) == five[:3]
    mask = [True, False, True, True, True]
    assert draws(framework, settings, 5, mask) == [x if kept else 0.0 for x, kept in zip(five, mask, strict=True)]


def test_keys_without_the_default_way_to_split_them():
    with jax.threefry_partitionable(False):
        five = draws("jax", {}, 5)
        assert draws("jax", {}, 3) == five[:3]


def test_keys_are_those_of_fold_in():
    expected = [float(jax.random.uniform(jax.random.fold_in(jax.random.key(3), i))) for i in range(3)]
    assert draws("jax", {"microbatch_size": 2}, 3) == expected
    seeds = [tf.random.fold_in(tf.constant([3, 5]), i) for i in range(3)]
    assert draws("tensorflow", {}, 3) == [float(tf.random.stateless_uniform([], seed)) for seed in seeds]


@pytest.mark.parametrize(
    ("impl", "settings"),
    [("threefry2x32", {"pad_to": 4}), ("rbg", {"microbatch_size": 1}), ("rbg", {"method": "loop"})],
    ids=str,
)
def test_a_key_in_the_batch_goes_with_its_example(impl, settings):
    """From a batch of `rbg` keys, `jax.vmap` would draw all numbers by the first key."""

    def loss(w, x, keys):
        drawn = jax.random.uniform(keys[0])
        return (w * x)[0, 0] * drawn, drawn

    clipped = gradclip.clipped_grad(loss, 100.0, batch_argnums=(1, 2), has_aux=True, **settings)
    keys = jnp.stack([jax.random.fold_in(jax.random.key(3, impl=impl), number) for number in range(5)])
    drawn = lambda numbers: np.asarray(clipped(jnp.ones(1), jnp.ones((4, 1)), keys[numbers])[1].aux).tolist()
    assert drawn(np.array([4, 1, 2, 3]))[1:] == drawn(np.array([0, 1, 2, 3]))[1:]
