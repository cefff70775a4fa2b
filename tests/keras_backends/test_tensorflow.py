"""Replicas, sparse gradients of embeddings, and graphs: what only TensorFlow has."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf

import gradclip
from gradclip.integrations.keras import ClippingMetrics, clipped
from keras_backends.known_gradients import SGD, linear_model, train, weights
from keras_backends.test_thresholds import Recorder, on_host


def norm_of_update(make, factors):
    """Return the norm of what two replicas, whose gradients are multiples of (3, 4), subtract together."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        variable = keras.Variable(np.zeros(2, np.float32))
        optimizer = make(1.0)
        optimizer.build([variable])

    @tf.function
    def step(factor):
        strategy.run(lambda factor: optimizer.apply([factor * [3.0, 4.0]], [variable]), args=(factor,))

    step(
        strategy.experimental_distribute_values_from_function(lambda context: factors[context.replica_id_in_sync_group])
    )
    return np.linalg.norm(variable.numpy()), optimizer


@pytest.mark.parametrize(
    ("factors", "of_keras", "norm"), [((1.0, 1.0), 2.0, 10.0), ((1.0, -100.0), 0.0, 495.0)], ids=["equal", "opposite"]
)
def test_the_sum_over_replicas_is_clipped_where_keras_clips_each(factors, of_keras, norm):
    by_keras, _ = norm_of_update(lambda rate: keras.optimizers.SGD(rate, global_clipnorm=1.0), factors)
    assert by_keras == pytest.approx(of_keras, abs=1e-6)
    ours, optimizer = norm_of_update(lambda rate: SGD(rate, max_norm=1.0), factors)
    assert ours == pytest.approx(1.0)
    assert (float(optimizer.last_norm), float(optimizer.clipped_share)) == (pytest.approx(norm), 1.0)


@pytest.mark.parametrize("around", [lambda inner: inner, keras.optimizers.LossScaleOptimizer], ids=["plain", "scaled"])
def test_fit_on_replicas(around):
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = linear_model(around(SGD(learning_rate=1.0, max_norm=1.0)))
    # Each replica has one row of a batch, and the loss is the mean of both.
    rows = [[6.0, 0.0], [0.0, 8.0], [0.5, 0.0], [0.1, 0.0]]
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    tighter = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: setattr(inner, "max_norm", 0.25))
    history = train(model, rows, batch_size=2, callbacks=[ClippingMetrics(), tighter])
    assert weights(model) == pytest.approx([-0.85, -0.8])
    assert (history["grad_norm"], history["clipped_share"]) == ([pytest.approx(0.3)], [1.0])


@pytest.mark.parametrize("around", [lambda inner: inner, keras.optimizers.LossScaleOptimizer], ids=["plain", "scaled"])
def test_replicas_keep_one_history(around):
    rule, recorder = gradclip.SteadyRule(window=2), Recorder()
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        inner = SGD(1.0, max_norm=rule)
        model = linear_model(around(inner))
    rows = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
    train(model, rows, batch_size=2, callbacks=[recorder])
    norms, thresholds = zip(*recorder.seen, strict=True)
    assert norms == pytest.approx(np.linalg.norm(rows.reshape(4, 2, 2).mean(axis=1), axis=1))
    assert list(thresholds) == on_host(rule, norms)
    for variable in inner.variables:
        one, other = variable.value.values
        assert one.device != other.device
        assert one.numpy().tolist() == other.numpy().tolist()


def test_histories_of_float64_variables_are_wide():
    optimizer = SGD(1.0, max_norm=gradclip.QuantileRule(1.0, window=4), scope="variable")
    variables = [tf.Variable(np.zeros(2)), tf.Variable([0.0])]
    for scale in (1.0, 10.0):
        optimizer.apply([tf.constant([3e200, 4e200], tf.float64) * scale, tf.constant([scale])], variables)
    assert optimizer.last_max_norm.numpy() == pytest.approx([5e200, 1.0])
    assert variables[0].numpy() == pytest.approx([-6e200, -8e200])


class SparseOnly(keras.optimizers.SGD):
    """SGD that refuses dense gradients."""

    def update_step(self, gradient, variable, learning_rate):
        assert isinstance(gradient, tf.IndexedSlices)
        super().update_step(gradient, variable, learning_rate)


@pytest.mark.parametrize("scope", ["global", "variable", "value"])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_gradients_of_embeddings_stay_sparse(scope, mode):
    model = keras.Sequential([keras.layers.Embedding(1000, 2, embeddings_initializer="zeros")])
    optimizer = clipped(SparseOnly)(learning_rate=1.0, max_norm=1.0, scope=scope)
    settings = {"run_eagerly": mode == "eager", "jit_compile": False}
    model.compile(optimizer, loss=lambda factors, rows: tf.reduce_sum(factors * rows), **settings)
    # Row 7 occurs twice, so that its gradient is (3, 4).
    words, factors = np.array([[7, 7]]), np.array([[[1.0, 1.0], [2.0, 3.0]]], np.float32)
    model.fit(words, factors, verbose=0)
    table = model.get_weights()[0]
    assert table[7] == pytest.approx([-1.0, -1.0] if scope == "value" else [-0.6, -0.8])
    assert np.count_nonzero(table) == 2
    assert float(optimizer.last_norm) == (4.0 if scope == "value" else 5.0)


@pytest.mark.parametrize("settings", [{"jit_compile": True}, {"steps_per_execution": 2}, {"run_eagerly": True}])
def test_ways_to_run(settings):
    model = linear_model(SGD(learning_rate=1.0, max_norm=1.0), **settings)
    history = train(model, [[3.0, 4.0], [0.3, 0.4]], callbacks=[ClippingMetrics()])
    assert weights(model) == pytest.approx([-0.9, -1.2])
    assert (history["grad_norm"], history["clipped_share"]) == ([pytest.approx(0.5)], [0.5])


def test_variables_of_tensorflow_in_a_loop_of_ones_own():
    optimizer = SGD(learning_rate=1.0, max_norm=1.0)
    variable = tf.Variable([0.0, 0.0])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.tensordot(variable, [3.0, 4.0], 1)
        optimizer.apply_gradients(zip(tape.gradient(loss, [variable]), [variable], strict=True))
        return optimizer.last_norm

    assert [float(step()) for _ in range(2)] == [5.0, 5.0]
    assert variable.numpy() == pytest.approx([-1.2, -1.6])


def test_an_unpickled_optimizer_may_be_built_in_a_graph():
    first, variable = clipped(keras.optimizers.Adam)(0.1, max_norm=gradclip.SteadyRule(window=2)), tf.Variable([0.0])
    first.apply([tf.constant([3.0])], [variable])
    again, other = copy.deepcopy(first), tf.Variable(variable)
    step = tf.function(lambda size: again.apply([size * [3.0]], [other]))
    for size in (2.0, 0.1):
        first.apply([tf.constant([3.0]) * size], [variable])
        step(tf.constant(size))
    assert other.numpy() == pytest.approx(variable.numpy(), rel=1e-6)
    assert again.counts() == first.counts() == (2, 3)


@pytest.mark.parametrize("max_norm", [1.0, 100.0])
def test_results_lie_where_their_gradients_do(max_norm):
    with tf.device("CPU:1"):
        there = tf.constant([3.0, 4.0])
    tree = [there, tf.constant([6.0, 8.0])]
    for clip in (gradclip.clip_by_global_norm, gradclip.clip_by_layer_norm, gradclip.clip_by_unit_norm):
        found, _ = clip(tree, max_norm)
        assert [x.device for x in found] == [x.device for x in tree]
