"""The threshold that follows: what it is, the theorem on what it cannot be led to, and the same bits everywhere."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gradclip
from gradclip import QuantileThreshold
from gradclip.core.formats import dtype_name

JUNK = np.array([math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0, 1e-45, 1e-320, 1e300])
"""What is not finite or not positive to a history of float32."""

RULES = [
    QuantileThreshold(),
    QuantileThreshold(factor=1.0, quantile=0.1, window=50),
    QuantileThreshold(factor=1.1, quantile=0.95, window=100),
    QuantileThreshold(factor=3.0, quantile=0.0, window=7),
    QuantileThreshold(factor=0.5, quantile=1.0, window=12),
    QuantileThreshold(window=1),
    QuantileThreshold(quantile=0.3, window=2, lower=0.125, upper=50.0),
    QuantileThreshold(quantile=0.07, window=100),
    QuantileThreshold(quantile=0.5, window=9, initial=1.0),
    QuantileThreshold(quantile=0.34, window=33),
]
HISTORIES = 2_000  # of each rule


def fed(rule, history, norms):
    for norm in norms:
        history = rule.observe(history, norm)
    return history


def clamped(rule, norm):
    """Return the threshold of a level, as float32 rounds it."""
    return np.clip(np.float32(norm) * np.float32(rule.factor), np.float32(rule.lower), np.float32(rule.upper))


def hostile(rng, rule):
    """Return a history for each column after up to three windows of norms of any size, and junk."""
    history = rule.init(shape=(HISTORIES,))
    lengths = rng.integers(0, 3 * rule.window + 1, HISTORIES)
    levels = np.exp(rng.uniform(-60, 60, HISTORIES))
    for step in range(3 * rule.window):
        norms = levels * np.exp(rng.choice([0.0, 1.0, 20.0], HISTORIES) * rng.standard_normal(HISTORIES))
        norms = np.where(rng.random(HISTORIES) < 0.3, rng.choice(JUNK, HISTORIES), norms)
        history = rule.observe(history, np.where(step < lengths, norms, math.nan))
    return history


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.quantile}-{rule.window}")
def test_after_k_norms_on_a_level_the_threshold_is_that_levels(rule):
    """20,000 hostile histories, each followed by K norms of a level with junk between them."""
    rng = np.random.default_rng(rule.window)
    history = hostile(rng, rule)
    low = np.exp(rng.uniform(-30, 30, HISTORIES)).astype(np.float32)
    high = low * (1 + rng.exponential(size=HISTORIES)).astype(np.float32)
    left = np.full(HISTORIES, rule.recovery_steps)
    while left.any():
        norms = rng.uniform(low, high).clip(low, high)
        good = (left > 0) & (rng.random(HISTORIES) < 0.6)
        history = rule.observe(history, np.where(good, norms, rng.choice(JUNK, HISTORIES)))
        left -= good
    threshold = rule.max_norm(history)
    assert (clamped(rule, low) <= threshold).all()
    assert (threshold <= clamped(rule, high)).all()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.quantile}-{rule.window}")
def test_one_step_less_does_not_suffice(rule):
    led = []
    for foreign in (1e-20, 1e20):
        history = fed(rule, rule.init(), [foreign] * rule.window + [1.0] * (rule.recovery_steps - 1))
        led.append(rule.max_norm(history) != clamped(rule, 1.0))
        assert rule.max_norm(rule.observe(history, 1.0)) == clamped(rule, 1.0)
    assert any(led)


def test_the_defaults_recover_within_65_steps():
    assert QuantileThreshold().recovery_steps == 65
    assert [QuantileThreshold(quantile=q, window=100).recovery_steps for q in (0.0, 0.1, 0.5, 0.95, 1.0)] == [
        *(100, 91, 51, 95, 100)
    ]


@pytest.mark.parametrize("quantile", [0.0, 0.07, 0.1, 1 / 3, 0.5, 0.9, 0.95, 1.0])
def test_it_is_a_lower_quantile_of_the_last_norms(quantile):
    rule = QuantileThreshold(factor=1.0, quantile=quantile, window=30)
    rng, history, seen = np.random.default_rng(1), rule.init(), []
    for norm in rng.exponential(size=70).astype(np.float32):
        history = rule.observe(history, norm)
        seen.append(norm)
        expected = np.quantile(seen[-30:], round(quantile, 6), method="inverted_cdf")
        assert rule.max_norm(history) == expected


def test_a_decimal_means_itself():
    """0.07 * 100 is above 7 in floating point, and would ask for the eighth."""
    rule = QuantileThreshold(factor=1.0, quantile=0.07, window=100)
    assert rule.max_norm(fed(rule, rule.init(), map(float, range(1, 101)))) == 7.0


def test_the_first_step_and_the_bounds():
    rule = QuantileThreshold(initial=5.0, lower=0.5, upper=10.0)
    history = rule.init()
    assert rule.max_norm(history) == 5.0
    assert rule.max_norm(rule.observe(history, 1.0)) == 2.0
    assert rule.max_norm(rule.observe(history, 0.1)) == 0.5
    assert rule.max_norm(rule.observe(history, 100.0)) == 10.0
    assert QuantileThreshold().max_norm(QuantileThreshold().init()) == math.inf
    assert QuantileThreshold(upper=1.0).max_norm(QuantileThreshold(upper=1.0).init()) == 1.0
    # The bound as float32 has it is not above the bound.
    assert float(QuantileThreshold(upper=0.1).max_norm(QuantileThreshold(upper=0.1).init())) <= 0.1


def test_few_operations_give_what_many_do():
    """One norm at each step in NumPy takes a path of its own; layers do not."""
    for rule in RULES:
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


def test_first_thresholds_may_be_beyond_float32():
    rule = QuantileThreshold(initial=1e300)
    assert rule.max_norm(rule.init()) == np.finfo(np.float32).max
    assert rule.max_norm(rule.init(np.zeros(()))) == 1e300
    assert rule.max_norm(rule.init(shape=(2,))).tolist() == [np.finfo(np.float32).max] * 2


def test_what_was_there_is_not_written():
    rule = QuantileThreshold(window=2)
    history = rule.observe(rule.init(), 1.0)
    before = history.norms.copy()
    rule.observe(history, 2.0)
    np.testing.assert_array_equal(history.norms, before)


@pytest.mark.parametrize(("dtype", "off"), [(np.float32, 1.2e-7), (np.float64, 2.3e-16)])
def test_the_threshold_is_as_near_to_the_product_as_is_said(dtype, off):
    rng = np.random.default_rng(4)
    for factor in (2.1, 1.1, 1 / 3, *np.exp(rng.uniform(-4, 4, 20)).tolist()):
        rule, least = QuantileThreshold(factor=factor, window=1), 0
        for norm in np.exp(rng.uniform(-9, 9, 50)).astype(dtype).tolist():
            threshold = rule.max_norm(rule.observe(rule.init(np.zeros((), dtype)), norm))
            exact = Fraction(factor) * Fraction(norm)
            assert abs(Fraction(float(threshold)) - exact) <= Fraction(off) * exact
            least = min(least, Fraction(float(threshold)) / exact - 1)
    assert least < 0  # it may be below factor * norm


@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize("like", [torch.zeros(()), np.zeros((), np.float32)], ids=["torch", "numpy"])
def test_a_history_keeps_no_graph(like, shape):
    rule, weight = QuantileThreshold(window=4), torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    history = rule.init(like, shape)
    for _ in range(3):
        norm = weight.norm()
        history = rule.observe(history, [norm, 2 * norm] if shape else norm)
        loss = (norm - torch.as_tensor(rule.max_norm(history))).sum()
        loss.backward()  # an error where the graph of an earlier step is part of this one
    assert not getattr(history.norms, "requires_grad", False)
    assert np.asarray(rule.max_norm(history)).ravel()[0] == 10.0


def test_no_derivative_goes_through_a_history():
    rule = QuantileThreshold(window=4)

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
    rule = QuantileThreshold(window=2)
    assert rule.max_norm(rule.observe(rule.init(), norm)) == 6.0
    assert rule.max_norm(rule.observe(rule.init(shape=(2,)), [norm, norm])).tolist() == [6.0, 6.0]


# The same in every framework

LIKE = {
    "numpy": lambda dtype: np.zeros((), dtype),
    "torch": lambda dtype: torch.zeros((), dtype=getattr(torch, dtype)),
    "jax": lambda dtype: jnp.zeros((), dtype),
    "tensorflow": lambda dtype: tf.zeros((), dtype),
}


def awkward_norms():
    rng = np.random.default_rng(3)
    norms = np.exp(rng.uniform(-85, 85, 300)).astype(np.float32)
    edges = np.float32([2.0**-126, 2.0**-125, 2.0**126, 2.0**127, 3.4e38, 2.0**-149, 1e-38])
    return np.where(rng.random(300) < 0.3, rng.choice([*edges, math.nan, math.inf, 0.0, -1.0], 300), norms)


@pytest.mark.parametrize("factor", [1.1, 2.0, 0.3])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_equal_norms_give_the_same_bits(factor, shape):
    rule = QuantileThreshold(factor=factor, quantile=0.3, window=17, lower=1e-30, upper=0.1 / 3 * 1e30)
    seen = {}
    calls = {
        "numpy": (np.float32, rule.observe, rule.max_norm),
        "torch": (torch.tensor, rule.observe, rule.max_norm),
        "jax": (jnp.float32, rule.observe, rule.max_norm),
        "tensorflow": (tf.constant, rule.observe, rule.max_norm),
        "jax.jit": (jnp.float32, jax.jit(rule.observe), jax.jit(rule.max_norm)),
        "numbers": (float, rule.observe, rule.max_norm),
    }
    for name, (as_norm, observe, threshold) in calls.items():
        history, found = rule.init(LIKE.get(name.partition(".")[0], LIKE["numpy"])("float32"), shape), []
        for norm in awkward_norms().astype(np.float32):
            given = as_norm(norm) if not shape or name == "numbers" else np.full(shape, norm)
            convert = {"torch": torch.from_numpy, "tensorflow": tf.constant}.get(name) if shape else None
            history = observe(history, convert(given) if convert else given)
            found.append(np.asarray(threshold(history)))
        seen[name] = np.stack(found)
        assert seen[name].dtype == np.float32
    for found in seen.values():
        np.testing.assert_array_equal(found.view(np.int32), seen["numpy"].view(np.int32))


@pytest.mark.parametrize("name", LIKE)
def test_histories_have_the_dtype_of_what_they_are_like(name):
    rule = QuantileThreshold(window=3)
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
    rule = QuantileThreshold(window=3)
    for shape in ((), (2,)):
        like = LIKE[name]("float32")
        half = LIKE[name]("float16") + norm
        history = rule.observe(rule.init(like, shape), half)
        assert np.asarray(rule.max_norm(history)).ravel()[0] == (6.0 if norm == 3.0 else math.inf)
        assert np.all(np.asarray(history.count) == (norm == 3.0))


def test_it_runs_in_a_scan():
    rule = QuantileThreshold(window=4)

    def step(history, norm):
        return rule.observe(history, norm), rule.max_norm(history)

    history, thresholds = jax.lax.scan(step, rule.init(jnp.zeros(())), jnp.array([3.0, math.nan, 5.0, 4.0, 6.0]))
    assert thresholds.tolist() == [math.inf, 6.0, 6.0, 6.0, 8.0]
    assert history.norms.tolist() == [6.0, 4.0, 5.0, 3.0]


def test_it_compiles_in_pytorch():
    rule = QuantileThreshold(window=4)
    both = torch.compile(lambda h, n: (rule.observe(h, n), rule.max_norm(h)), backend="eager", fullgraph=True)
    history = both(rule.init(torch.zeros(())), torch.tensor(3.0))[0]
    assert both(history, torch.tensor(4.0))[1].item() == 6.0


class NoWaits(TorchDispatchMode):
    """Raises where a value is looked at, for which an accelerator would be waited for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "waits"
        return func(*args, **(kwargs or {}))


def test_nothing_waits():
    rule = QuantileThreshold(window=4)
    with pytest.raises(AssertionError, match="waits"), NoWaits():
        torch.ones(2)[torch.tensor(1)]
    for shape in ((), (2,)):
        history, norm = rule.init(torch.zeros(()), shape), torch.tensor(3.0)
        with NoWaits():
            rule.max_norm(rule.observe(history, norm))


# Layers


@pytest.mark.parametrize("name", LIKE)
def test_each_layer_has_a_threshold_of_its_own(name):
    rule, like = QuantileThreshold(window=4), LIKE[name]("float32")
    history = rule.init(like, shape=(2,))
    history = rule.observe(history, [3.0, math.nan])
    history = rule.observe(history, [5.0, 10.0])
    assert np.asarray(rule.max_norm(history)).tolist() == [6.0, 20.0]
    assert np.asarray(history.count).tolist() == [2, 1]
    assert np.asarray(rule.observe(history, 1.0).norms)[:, 0].tolist() == [1.0, 1.0]


def test_layers_are_clipped_by_their_thresholds():
    rule, layers = QuantileThreshold(), [np.float32([3.0, 4.0]), np.float32([0.0, 0.5])]
    history = rule.observe(rule.init(shape=(2,)), [0.5, 0.5])
    clipped, norms = gradclip.clip_by_layer_norm(layers, list(rule.max_norm(history)))
    assert [round(float(x), 5) for layer in clipped for x in layer] == [0.6, 0.8, 0.0, 0.5]
    assert rule.observe(history, norms).norms[:, 0].tolist() == [5.0, 0.5]


def test_layers_are_clipped_by_their_thresholds_under_jit():
    rule, layers = QuantileThreshold(), [jnp.array([3.0, 4.0]), jnp.array([0.0, 0.5])]

    @jax.jit
    def step(history):
        clipped, norms = gradclip.clip_by_layer_norm(layers, list(rule.max_norm(history)))
        return clipped, rule.observe(history, norms)

    _, history = step(rule.init(jnp.zeros(()), shape=(2,)))
    assert history.norms[:, 0].tolist() == [5.0, 0.5]


# What is refused


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"factor": 0.0}, ValueError, "factor must be from"),
        ({"factor": math.nan}, ValueError, "factor must be from"),
        ({"factor": "2"}, TypeError, "factor must be a number, got '2' of type str"),
        ({"quantile": 1.5}, ValueError, "quantile must be from 0.0 to 1.0, got 1.5"),
        ({"quantile": True}, TypeError, "quantile must be a number"),
        ({"window": 0}, ValueError, "window must be from 1 to 32768, got 0"),
        ({"window": 2**15 + 1}, ValueError, "window must be from 1 to 32768"),
        ({"window": 2.0}, TypeError, "window must be a whole number"),
        ({"initial": -1.0}, ValueError, "initial must be from 0.0 to inf"),
        ({"lower": math.nan}, ValueError, "lower must be from"),
        ({"lower": 2.0, "upper": 1.0}, ValueError, r"lower must not be above upper, got lower=2.0 and upper=1.0"),
    ],
)
def test_settings_are_checked(settings, kind, words):
    with pytest.raises(kind, match=words):
        QuantileThreshold(**settings)


def test_a_history_is_like_an_array():
    with pytest.raises(
        TypeError, match=r"like must be an array of NumPy, PyTorch, JAX or TensorFlow, got 'cpu' of type str"
    ):
        QuantileThreshold().init("cpu")


def test_rules_are_values():
    assert QuantileThreshold() == QuantileThreshold(factor=2, quantile=np.float64(0.5), window=np.int64(128))
    assert hash(QuantileThreshold()) == hash(QuantileThreshold())
    assert "_fraction" not in repr(QuantileThreshold())


def test_a_history_is_the_rules_own():
    for shape in ((), (2,)):
        history = QuantileThreshold(window=8).init(shape=shape)
        for call in (QuantileThreshold(window=4).max_norm, lambda h: QuantileThreshold(window=4).observe(h, 1.0)):
            with pytest.raises(ValueError, match=r"history holds 8 norms, but this rule's window is 4"):
                call(history)


def test_norms_of_a_tree_come_as_its_leaves():
    rule, norms = QuantileThreshold(), {"w": np.float32(1.0), "b": np.float32(2.0)}
    with pytest.raises(TypeError, match=r"norms of layers must be an array or a list, got a dict. Pass its leaves"):
        rule.observe(rule.init(shape=(2,)), norms)
    assert rule.observe(rule.init(shape=(2,)), list(norms.values())).norms[:, 0].tolist() == [1.0, 2.0]
