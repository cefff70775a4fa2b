"""Programs that train privately, choose thresholds or watch them, and that type checkers must accept."""

from pathlib import Path
from typing import assert_type

import jax.numpy as jnp
import numpy as np
from jax import Array

import gradclip
from gradclip.typing import Advice, Counts, Mask, Relation, RuleName, Step, Trial

Float = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def loss(params: Array, x: Array, y: Array) -> Array:
    return jnp.sum((x @ params - y) ** 2)


def a_run(x: Float, y: Float, params: Array) -> float:
    batches = gradclip.PoissonBatches(n=1000, rate=0.1, steps=60)
    summed = gradclip.clipped_grad(loss, 1.0, batch_argnums=(1, 2), pad_to=batches.pad_to)
    assert_type(summed, gradclip.ClippedFunction)
    run = gradclip.PrivateRun(batches, summed.sensitivity(), epsilon=3, delta=1e-4)
    for rows, mask in batches:
        params -= run.add_noise(summed(params, x[rows], y[rows], mask=mask)) / 1000
    return run.epsilon()


def a_function() -> gradclip.Sensitivity:
    return gradclip.clipped_fun(lambda x: x, 1.0, unit="group").sensitivity(
        "zero_out", layout=gradclip.SumLayout(summed_in="float32")
    )


def given_gradients(grads: dict[str, Float], mask: Mask, rule: RuleName) -> dict[str, Float]:
    summed, info = gradclip.per_example_clip(grads, 1.0, mask=mask, rule=rule, sum_dtype=np.float64)
    assert_type(info, gradclip.PerExampleInfo)
    return summed


def with_noise(summed: dict[str, Float], relation: Relation) -> dict[str, Float]:
    sensitivity = gradclip.clipped_sum_sensitivity(
        {"w": 3.0}, relation, layout=gradclip.SumLayout(partial_sums_in="bfloat16")
    )
    return gradclip.add_noise(summed, sensitivity, noise_multiplier=1.1)


def checked(examples: Float) -> gradclip.SensitivityReport:
    return gradclip.check_sensitivity(lambda x: x, examples, sensitivity=1.0, dtypes=["float16"], trials=3)


def audited(scores: Float, included: list[bool]) -> float:
    return gradclip.audited_epsilon(scores, included, guesses=10, delta=1e-5)


def at_a_quantile() -> gradclip.PrivateQuantile:
    return gradclip.PrivateQuantile(0.5)


def a_threshold() -> gradclip.AdaptiveThreshold:
    gradclip.AdaptiveThreshold()
    gradclip.AdaptiveThreshold(gradclip.SpreadRule(window=64))
    return gradclip.AdaptiveThreshold(gradclip.QuantileRule(1, 0.9, window=1_000), skip_above=5)


def a_search() -> tuple[Trial, ...]:
    def train(max_norm: float, learning_rate: float, seed: int) -> float:
        return max_norm * learning_rate + seed

    return gradclip.find_max_norm(train, [0.1, 1.0], seeds=2).table


def a_monitor(path: Path) -> Advice:
    monitor = gradclip.Monitor(capacity=100, callback=lambda step, numbers: None)
    monitor.record(1.0, 0.5)
    assert_type(monitor.counts, Counts)
    assert_type(monitor.last, Step | None)
    assert_type(monitor.spikes, list[gradclip.Spike])
    monitor.save(path)
    assert_type(gradclip.Monitor.load("steps.jsonl"), gradclip.Monitor)
    assert_type(monitor.advise().max_norm, float | None)
    return monitor.advise()


def a_spike(params: Array, batch: tuple[Array, Array]) -> gradclip.SpikeExplanation:
    return gradclip.explain_spike(loss, params, batch=batch)


def mistakes() -> None:
    try:
        raise gradclip.ClippingError("clipped twice")
    except (gradclip.ClippingError, gradclip.ClippingWarning):
        pass
