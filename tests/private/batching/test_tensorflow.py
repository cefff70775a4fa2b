"""Functions of one example over a batch: beside PyTorch's results of the same functions."""

import numpy as np
import pytest
import tensorflow as tf
import torch

import gradclip
from gradclip._src.tree import flatten
from losses import BATCH, problem

OPTIONS = [
    {},
    {"microbatch_size": 3},
    {"microbatch_size": 16},
    {"pad_to": 9},
    {"method": "loop"},
    {"microbatch_size": 2, "method": "loop"},
]
MASKS = (None, [True, False, True, True, False, False, False], [False] * BATCH)


def loss(params, x, y):
    out = x @ params["w"] + params["b"]
    return tf.reduce_mean((out - y) ** 2), {"out": out, "total": tf.reduce_sum(out)}


def same_loss(params, x, y):
    out = x @ params["w"] + params["b"]
    return ((out - y) ** 2).mean(), {"out": out, "total": out.sum()}


def same(found, expected):
    found, expected = flatten(found).leaves, flatten(expected).leaves
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert tuple(x.shape) == tuple(y.shape)
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_sums_of_clipped_gradients(options):
    asked = {"batch_argnums": (1, 2), "has_aux": True, "return_values": True, "return_norms": True, **options}
    mine = gradclip.clipped_grad(loss, 0.5, **asked)
    known = gradclip.clipped_grad(same_loss, 0.5, **asked)
    recorded = tf.function(lambda mask, *args: mine(*args, mask=mask))
    for mask in MASKS:
        expected = known(*problem(torch.from_numpy), mask=mask)
        same(mine(*problem(tf.constant), mask=mask), expected)
        same(recorded(None if mask is None else tf.constant(mask), *problem(tf.constant)), expected)


@pytest.mark.parametrize("method", ["materialize", "loop"])
def test_no_example_gives_zeros(method):
    params, x, y = problem(tf.constant)
    found, outputs = gradclip.clipped_grad(
        loss, 0.5, batch_argnums=(1, 2), has_aux=True, return_norms=True, method=method
    )(params, x[:0], y[:0])
    assert all(not np.any(np.asarray(leaf)) for leaf in flatten(found).leaves)
    assert outputs.norms.shape == (0,)
    assert outputs.aux["out"].shape == (0, 2)


def test_variables_are_parameters_and_stay_as_they_are():
    params, x, y = problem(tf.constant)
    variables = {key: tf.Variable(value) for key, value in params.items()}
    options = {"batch_argnums": (1, 2), "has_aux": True, "return_values": True}
    found = gradclip.clipped_grad(loss, 0.5, **options)(variables, x, y)
    same(found, gradclip.clipped_grad(loss, 0.5, **options)(params, x, y))
    same(variables, params)


def test_a_kept_graph_reads_the_values_of_each_call():
    params, x, y = problem(tf.constant)
    mine = gradclip.clipped_grad(loss, 0.5, batch_argnums=(1, 2), has_aux=True, return_values=True)
    first, again = mine(params, x, y), mine(params, 2 * x, y)
    assert len(mine._programs) == 1
    same(
        again,
        gradclip.clipped_grad(loss, 0.5, batch_argnums=(1, 2), has_aux=True, return_values=True)(params, 2 * x, y),
    )
    assert not np.allclose(first[0]["w"], again[0]["w"])


def test_rows_of_embeddings():
    table, rows = tf.constant(np.arange(12.0, dtype=np.float32).reshape(4, 3)), tf.constant([[0], [2], [2]])
    mine = gradclip.clipped_grad(lambda t, k: tf.reduce_sum(tf.gather(t, k) ** 2), 1.0)
    known = gradclip.clipped_grad(lambda t, k: (t[k] ** 2).sum(), 1.0)
    same(mine(table, rows), known(torch.arange(12.0).reshape(4, 3), torch.tensor([[0], [2], [2]])))


def test_what_a_parameter_does_not_take_part_in_is_zero():
    mine = gradclip.clipped_grad(lambda p, x: tf.reduce_sum(p["used"] * x), 1.0)
    with pytest.warns(UserWarning, match=r"does not use argument 0\['idle'\]: .* as model.stateless_call"):
        found = mine({"used": tf.ones(3), "idle": tf.ones(2)}, tf.ones([4, 3]))
    assert np.asarray(found["idle"]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("method", ["materialize", "loop"])
@pytest.mark.parametrize(
    ("loss", "params", "error", "said"),
    [
        (lambda p, x: p * x, tf.ones(3), ValueError, r"one number for each example, got an array of shape \(1, 3\)"),
        (lambda p, x: 1, tf.ones(3), TypeError, "a real floating-point number, got int32"),
        (lambda p, x: tf.complex(x, x)[0, 0], tf.ones(3), TypeError, "got complex64"),
        (lambda p, x: x[0, 0], tf.ones(3, tf.int32), TypeError, "argument 0 has dtype int32, which has no gradient"),
    ],
)
def test_what_has_no_gradient_is_an_error(loss, params, error, said, method):
    with pytest.raises(error, match=said):
        gradclip.clipped_grad(loss, 1.0, batch_argnums=1, method=method)(params, tf.ones([4, 3]))


def test_a_loss_that_is_a_number_of_python_has_zeros_for_gradients():
    with pytest.warns(UserWarning, match="does not use argument 0"):
        found = gradclip.clipped_grad(lambda p, x: 1.0, 1.0)(tf.ones(3), tf.ones([4, 3]))
    assert np.asarray(found).tolist() == [0.0] * 3


def test_each_example_draws_from_a_key_of_its_own():
    mine = gradclip.clipped_grad(
        lambda p, x, key: tf.reduce_sum(p * x * tf.random.stateless_normal([3], key)),
        1e9,
        batch_argnums=1,
        prng_argnum=2,
        return_norms=True,
    )
    _, outputs = mine(tf.ones(3), tf.ones([4, 3]), tf.constant([1, 2]))
    assert len(set(np.asarray(outputs.norms).tolist())) == 4


def test_results_of_functions():
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    summed = gradclip.clipped_fun(lambda row: row * 2, 1.0, keep_batch_dim=False)(tf.constant(x))
    np.testing.assert_allclose(summed, gradclip.per_example_clip(2 * x, 1.0)[0], rtol=1e-6)


def test_sensitivity_is_checked():
    mine = gradclip.clipped_grad(
        lambda p, x: tf.reduce_sum(p * x), 0.5, batch_argnums=1, microbatch_size=1, return_norms=False
    )
    params = tf.ones(3)
    report = gradclip.check_sensitivity(
        lambda x: mine(params, x), tf.ones([4, 3]), sensitivity=mine.sensitivity(batch_size=4)
    )
    assert report.holds
    lie = gradclip.check_sensitivity(lambda x: tf.reduce_sum(x, axis=0), tf.ones([4, 3]), sensitivity=0.5)
    assert not lie.holds


def test_the_settings_of_a_clipped_function_are_checked():
    mine = gradclip.clipped_grad(lambda p, x: tf.reduce_sum(p * x), 0.5, batch_argnums=1, pad_to=8)
    report = gradclip.check_sensitivity(mine, tf.ones([4, 3]), sensitivity=mine.sensitivity(), trials=1)
    assert report.holds
    assert not gradclip.check_sensitivity(mine, tf.ones([4, 3]), sensitivity=0.1, trials=1).holds


def test_a_batch_of_unknown_length_is_an_error():
    mine = gradclip.clipped_grad(lambda p, x: tf.reduce_sum(p * x), 1.0)
    call = tf.function(lambda x: mine(tf.ones(3), x), input_signature=[tf.TensorSpec([None, 3])])
    with pytest.raises(ValueError, match="drop_remainder=True"):
        call(tf.ones([4, 3]))


@pytest.mark.parametrize("mode", ["function", "xla"])
def test_examples_are_clipped_within_a_training_step(mode):
    params, x, y = problem(tf.constant)
    mine = gradclip.clipped_grad(loss, 0.5, batch_argnums=(1, 2), has_aux=True, return_norms=True)
    step = tf.function(lambda *args: mine(*args)[0], jit_compile=mode == "xla")
    same(step(params, x, y), mine(params, x, y)[0])
