"""The threshold that follows, in every framework: the same bits, compiled and traced, without graphs and waits."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gradclip
from gradclip import QuantileRule
from gradclip._src.core.formats import dtype_name
from norms_in_turn import RULES, SPREAD_RULES, awkward_norms


def test_few_operations_give_what_many_do():
    """One norm at each step in NumPy takes a path of its own; layers do not."""
    for rule in RULES + SPREAD_RULES:
        alone, layers = rule.init(), rule.init(shape=(1,))
        for norm in awkward_norms():
            alone, layers = rule.observe(alone, norm), rule.observe(layers, norm)
            assert rule.max_norm(alone).dtype == np.float32
            assert rule.max_norm(alone) == rule.max_norm(layers)[0]
            assert alone.count == layers.count[0]
        np.testing.assert_array_equal(alone.norms, layers.norms[0])
        alone, array = rule.observe(alone, 3.0), rule.observe(alone, np.array(3.0))
        assert alone.count == array.count
        np.testing.assert_array_equal(alone.norms, array.norms)


@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize("like", [torch.zeros(()), np.zeros((), np.float32)], ids=["torch", "numpy"])
def test_a_history_keeps_no_graph(like, shape):
    rule, weight = QuantileRule(window=4), torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    history = rule.init(like, shape)
    for _ in range(3):
        norm = weight.norm()
        history = rule.observe(history, [norm, 2 * norm] if shape else norm)
        loss = (norm - torch.as_tensor(rule.max_norm(history))).sum()
        loss.backward()  # an error where the graph of an earlier step is part of this one
    assert not getattr(history.norms, "requires_grad", False)
    assert np.asarray(rule.max_norm(history)).ravel()[0] == 10.0


def test_no_derivative_goes_through_a_history():
    rule = QuantileRule(window=4)

    def threshold(weight):
        return rule.max_norm(rule.observe(rule.init(jnp.zeros(())), jnp.linalg.norm(weight)))

    assert jax.grad(threshold)(jnp.array([3.0, 4.0])).tolist() == [0.0, 0.0]
    weight = tf.Variable([3.0, 4.0])
    with tf.GradientTape() as tape:
        found = rule.max_norm(rule.observe(rule.init(tf.zeros(())), tf.norm(weight)))
    assert tape.gradient(found, weight) is None
    assert float(found) == 10.0


@pytest.mark.parametrize("norm", [torch.tensor(3.0, dtype=torch.bfloat16), jnp.bfloat16(3.0), tf.constant(3.0)])
def test_a_history_takes_norms_of_other_frameworks(norm):
    rule = QuantileRule(window=2)
    assert rule.max_norm(rule.observe(rule.init(), norm)) == 6.0
    assert rule.max_norm(rule.observe(rule.init(shape=(2,)), [norm, norm])).tolist() == [6.0, 6.0]


# The same in every framework

LIKE = {
    "numpy": lambda dtype: np.zeros((), dtype),
    "torch": lambda dtype: torch.zeros((), dtype=getattr(torch, dtype)),
    "jax": lambda dtype: jnp.zeros((), dtype),
    "tensorflow": lambda dtype: tf.zeros((), dtype),
}


@pytest.mark.parametrize("factor", [1.1, 2.0, 0.3])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_equal_norms_give_the_same_bits(factor, shape):
    rule = QuantileRule(factor=factor, quantile=0.3, window=17, lower=1e-30, upper=0.1 / 3 * 1e30)
    seen = {}
    calls = {
        "numpy": (lambda norm: norm, rule.observe, rule.max_norm),
        "torch": (torch.tensor, rule.observe, rule.max_norm),
        "jax": (jnp.asarray, rule.observe, rule.max_norm),
        "tensorflow": (tf.constant, rule.observe, rule.max_norm),
        "jax.jit": (jnp.asarray, jax.jit(rule.observe), jax.jit(rule.max_norm)),
        "numbers": (np.ndarray.tolist if shape else float, rule.observe, rule.max_norm),
    }
    norms = awkward_norms().astype(np.float32).reshape(-1, *shape)[:150]
    for name, (as_norm, observe, threshold) in calls.items():
        history, found = rule.init(LIKE.get(name.partition(".")[0], LIKE["numpy"])("float32"), shape), []
        for norm in norms:
            history = observe(history, as_norm(norm))
            found.append(np.asarray(threshold(history)))
        seen[name] = np.stack(found)
        assert seen[name].dtype == np.float32
    for found in seen.values():
        np.testing.assert_array_equal(found.view(np.int32), seen["numpy"].view(np.int32))


@pytest.mark.parametrize("name", LIKE)
def test_histories_have_the_dtype_of_what_they_are_like(name):
    rule = QuantileRule(window=3)
    for dtype in ("float16", "float32", "float64", "int32"):
        if name == "jax" and dtype == "float64":
            continue
        expected = dtype if dtype == "float64" else "float32"
        history = rule.init(LIKE[name](dtype), (2,))
        assert dtype_name(history.norms) == expected
        assert (tuple(history.norms.shape), tuple(history.count.shape)) == ((2, 3), (2,))
    wide = rule.observe(rule.init(np.zeros(())), 1e200)
    assert rule.max_norm(wide) == 2e200


@pytest.mark.parametrize("name", LIKE)
@pytest.mark.parametrize("norm", [0.0, math.inf, math.nan, -1.0, 3.0])
def test_norms_in_half_types_count_as_they_are(name, norm):
    rule = QuantileRule(window=3)
    for shape in ((), (2,)):
        like = LIKE[name]("float32")
        half = LIKE[name]("float16") + norm
        history = rule.observe(rule.init(like, shape), half)
        assert np.asarray(rule.max_norm(history)).ravel()[0] == (6.0 if norm == 3.0 else math.inf)
        assert np.all(np.asarray(history.count) == (norm == 3.0))


def test_it_runs_in_a_scan():
    rule = QuantileRule(window=4)

    def step(history, norm):
        return rule.observe(history, norm), rule.max_norm(history)

    history, thresholds = jax.lax.scan(step, rule.init(jnp.zeros(())), jnp.array([3.0, math.nan, 5.0, 4.0, 6.0]))
    assert thresholds.tolist() == [math.inf, 6.0, 6.0, 6.0, 8.0]
    assert history.norms.tolist() == [6.0, 4.0, 5.0, 3.0]


def test_it_compiles_in_pytorch():
    rule = QuantileRule(window=4)
    both = torch.compile(lambda h, n: (rule.observe(h, n), rule.max_norm(h)), backend="eager", fullgraph=True)
    history = both(rule.init(torch.zeros(())), torch.tensor(3.0))[0]
    assert both(history, torch.tensor(4.0))[1].item() == 6.0


class NoWaits(TorchDispatchMode):
    """Raises where a value is looked at, for which an accelerator would be waited for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "waits"
        return func(*args, **(kwargs or {}))


def test_nothing_waits():
    rule = QuantileRule(window=4)
    with pytest.raises(AssertionError, match="waits"), NoWaits():
        torch.ones(2)[torch.tensor(1)]
    for shape in ((), (2,)):
        history, norm = rule.init(torch.zeros(()), shape), torch.tensor(3.0)
        with NoWaits():
            rule.max_norm(rule.observe(history, norm))


# Layers


@pytest.mark.parametrize("name", LIKE)
def test_each_layer_has_a_threshold_of_its_own(name):
    rule, like = QuantileRule(window=4), LIKE[name]("float32")
    history = rule.init(like, shape=(2,))
    history = rule.observe(history, [3.0, math.nan])
    history = rule.observe(history, [5.0, 10.0])
    assert np.asarray(rule.max_norm(history)).tolist() == [6.0, 20.0]
    assert np.asarray(history.count).tolist() == [2, 1]
    assert np.asarray(rule.observe(history, 1.0).norms)[:, 0].tolist() == [1.0, 1.0]


def test_layers_are_clipped_by_their_thresholds():
    rule, layers = QuantileRule(), [np.float32([3.0, 4.0]), np.float32([0.0, 0.5])]
    history = rule.observe(rule.init(shape=(2,)), [0.5, 0.5])
    clipped, norms = gradclip.clip_by_layer_norm(layers, list(rule.max_norm(history)))
    assert [round(float(x), 5) for layer in clipped for x in layer] == [0.6, 0.8, 0.0, 0.5]
    assert rule.observe(history, norms).norms[:, 0].tolist() == [5.0, 0.5]


def test_layers_are_clipped_by_their_thresholds_under_jit():
    rule, layers = QuantileRule(), [jnp.array([3.0, 4.0]), jnp.array([0.0, 0.5])]

    @jax.jit
    def step(history):
        clipped, norms = gradclip.clip_by_layer_norm(layers, list(rule.max_norm(history)))
        return clipped, rule.observe(history, norms)

    _, history = step(rule.init(jnp.zeros(()), shape=(2,)))
    assert history.norms[:, 0].tolist() == [5.0, 0.5]


def test_norms_of_a_tree_come_as_its_leaves():
    rule, norms = QuantileRule(), {"w": np.float32(1.0), "b": np.float32(2.0)}
    with pytest.raises(TypeError, match=r"norms of layers must be an array or a list, got a dict. Pass its leaves"):
        rule.observe(rule.init(shape=(2,)), norms)
    assert rule.observe(rule.init(shape=(2,)), list(norms.values())).norms[:, 0].tolist() == [1.0, 2.0]
