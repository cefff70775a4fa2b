"""Threads that round in one direction, as some libraries leave it: results are those of rounding to nearest."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gradclip
from frameworks import ALL, by_name
from fresh_process import run
from rounding import DIRECTIONS, rounding

HOSTS = [f for f in ALL if f.name in ("numpy", "torch", "jax", "mlx")]


def in_place(call):
    def done(tree):
        holders = [SimpleNamespace(grad=x) for x in tree]
        call(holders)
        return [holder.grad for holder in holders]

    return done


CALLS = {
    "global_norm": lambda tree: [gradclip.global_norm(tree, ord) for ord in (1, 2, 2.5, 3)],
    "clip_by_global_norm": lambda tree: gradclip.clip_by_global_norm(tree, 0.3)[0],
    "clip_by_global_norm, kept": lambda tree: gradclip.clip_by_global_norm(tree, 1e9)[0],
    "clip_by_layer_norm": lambda tree: gradclip.clip_by_layer_norm(tree, 0.3, ord=3)[0],
    "clip_by_unit_norm": lambda tree: gradclip.clip_by_unit_norm(tree, 0.3)[0],
    "per_example_clip": lambda tree: [gradclip.per_example_clip(tree, 0.3)[0]],
    "clip_grad_norm_": in_place(lambda holders: gradclip.clip_grad_norm_(holders, 0.3)),
}


def given(framework, strided):
    """Return leaves of random numbers, in new memory; strided where the framework has such."""
    values = np.random.default_rng(0).normal(size=(2, 40, 7)).astype(np.float32)
    if strided and framework.name == "torch":
        return [torch.from_numpy(x.repeat(2, axis=1))[:, ::2] for x in values]
    if strided and framework.name == "numpy":
        return [x.repeat(2, axis=1)[:, ::2] for x in values]
    return [framework.from_numpy(x.copy()) for x in values]


def bits(framework, result):
    leaves = [x for part in result for x in (part if isinstance(part, list | tuple) else [part])]
    return [framework.to_numpy(x).tobytes() for x in leaves]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("framework", HOSTS, ids=by_name)
def test_results_have_the_same_bits(framework, name, strided, direction):
    expected = bits(framework, CALLS[name](given(framework, strided)))
    tree = given(framework, strided)
    with rounding(direction):
        found = CALLS[name](tree)
    assert bits(framework, found) == expected


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_exact_answers_are_right(direction):
    rng = np.random.default_rng(0)
    vectors = [[3.0, 4.0], *rng.normal(size=(100, 2)).tolist()]
    for vector in vectors:
        norm = float(np.hypot(*vector))
        thresholds = [float(np.nextafter(norm, 0)), norm, float(np.nextafter(norm, 9))]
        expected = [gradclip.norm_at_most(np.array(vector), threshold) for threshold in thresholds]
        with rounding(direction):
            assert [gradclip.norm_at_most(np.array(vector), threshold) for threshold in thresholds] == expected


def test_results_without_kernels_have_the_same_bits(tmp_path):
    printed = run(
        f"""
        import ctypes
        import numpy as np
        import gradclip

        x = np.random.default_rng(0).normal(size=500)
        for direction in (0, *{list(DIRECTIONS.values())}):
            ctypes.CDLL(None).fesetround(direction)
            clipped, norm = gradclip.clip_by_global_norm(x, 0.3)
            kept = gradclip.clip_by_global_norm(np.array([3.0, 4.0]), 5.0)[0]
            ctypes.CDLL(None).fesetround(0)
            print(float(norm).hex(), hash(clipped.tobytes()), kept.tolist())
        """,
        tmp_path,
        GRADCLIP_NATIVE="0",
    )
    assert len(printed.splitlines()) == 4
    assert len(set(printed.splitlines())) == 1


def thresholds(rule, like, norms):
    """Return the thresholds before each norm, with those of the state that is left."""
    state, found = rule.init(like), []
    for norm in norms:
        found.append(rule.max_norm(state))
        state = rule.observe(state, norm)
    return np.array([*found, rule.max_norm(state)])


NORMS = np.exp(np.random.default_rng(0).normal(size=40))
RULES = {
    "SpreadRule": lambda: thresholds(gradclip.SpreadRule(), np.zeros(()), NORMS),
    "QuantileRule": lambda: thresholds(gradclip.QuantileRule(factor=1.3), np.zeros((), np.float32), NORMS),
    "SteadyRule": lambda: thresholds(gradclip.SteadyRule(factor=1.3), np.zeros(()), NORMS),
    "SpreadRule, layers": lambda: layered(gradclip.SpreadRule()),
    "PrivateQuantile": lambda: private(gradclip.PrivateQuantile(initial=1.3)),
    "gradient_noise": lambda: np.array([gradclip.PrivateQuantile.gradient_noise(z, 5.3) for z in (0.7, 1.1, 2.2)]),
}


def layered(rule):
    history = rule.init(np.zeros(()), shape=(4,))
    for norms in NORMS.reshape(10, 4):
        history = rule.observe(history, norms)
    return rule.max_norm(history)


def private(rule):
    state, found = rule.init(np.zeros(())), []
    for noised in (0.3, 0.8, 0.55):
        state = rule.observe_fraction(state, noised)
        found.append(rule.max_norm(state))
    return np.array(found)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", RULES)
def test_thresholds_have_the_same_bits(name, direction):
    expected = RULES[name]()
    with rounding(direction):
        found = RULES[name]()
    assert found.tobytes() == expected.tobytes()


@pytest.mark.after_error
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_noise_has_the_same_bits(direction):
    sensitivity = gradclip.clipped_sum_sensitivity(0.7, batch_size=50, layout=gradclip.SumLayout(elements=40))
    total = np.random.default_rng(1).normal(size=40).astype(np.float32)
    expected = gradclip.add_noise(total, sensitivity, noise_multiplier=1.1, rng=np.random.default_rng(0))
    generator = np.random.default_rng(0)
    with rounding(direction):
        found = gradclip.add_noise(total, sensitivity, noise_multiplier=1.1, rng=generator)
        with pytest.raises(TypeError, match=r"must be a gradclip\.Sensitivity"):
            gradclip.add_noise(total, 0.7, noise_multiplier=1.1, rng=generator)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_noise_of_a_private_run_is_the_same(direction):
    batches = gradclip.PoissonBatches(1000, 0.05, steps=20)
    sensitivity = gradclip.clipped_sum_sensitivity(
        1.0, batch_size=batches.pad_to, layout=gradclip.SumLayout(elements=1000)
    )

    def run():
        made = gradclip.PrivateRun(batches, sensitivity, delta=1e-5, epsilon=3.0)
        return made.noise_multiplier, made.epsilon(10)

    expected = run()
    with rounding(direction):
        found = run()
    assert found == expected


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_partial_norms_are_restored_to_the_last_bit(direction):
    rng = np.random.default_rng(0)
    parts = [gradclip.partial_norm(rng.normal(size=9) * 10.0**power, ord=3) for power in range(-300, 300, 30)]
    texts = [part.to_json() for part in parts]
    with rounding(direction):
        restored = list(map(gradclip.PartialNorm.from_json, texts))
        written = [part.to_json() for part in parts]
    assert restored == parts
    assert written == texts
