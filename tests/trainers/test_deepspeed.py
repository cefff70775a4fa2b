"""DeepSpeed's engines clip to the threshold that `clip_at_step` sets: what was applied shows in the weights."""

import math
from pathlib import Path

import pytest

from processes import run

WORKER = Path(__file__).with_name("deepspeed_worker.py")
ALONE = (
    "stages",
    "offloaded",
    "bfloat16",
    "float16",
    "accumulation",
    "not_finite",
    "fixed",
    "resumed",
    "refused",
    "plain_calls",
)
TOGETHER = ("stages", "offloaded", "accumulation", "disagreeing", "failing", "plain_calls")
NEAR = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run(WORKER, tmp_path_factory.mktemp("alone"), 1, ALONE)[0]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run(WORKER, tmp_path_factory.mktemp("two"), 2, TOGETHER)


def check_spike(found, near=NEAR["float32"]):
    applied, norms, thresholds = zip(*found["seen"], strict=True)
    assert norms == pytest.approx([7.8] * 4 + [1238.0], rel=near)
    assert thresholds[0] == math.inf
    assert thresholds[1:] == pytest.approx([15.6] * 4, rel=near)
    assert applied == pytest.approx([7.8] * 4 + [15.6], rel=near)
    assert found["counts"] == [5, 1, 0, 0]
    assert found["recorded"] == [[norm, threshold] for norm, threshold in zip(norms, thresholds, strict=True)]
    assert found["reported"] == norms[-1]
    assert found["after"] == pytest.approx(3.0, rel=near)
    assert found["left"] == []


@pytest.mark.parametrize("stage", range(4))
def test_a_spike_is_clipped_in_each_stage(alone, stage):
    check_spike(alone["stages"][stage])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_spike_is_clipped_where_the_optimizer_is_offloaded(alone, stage):
    check_spike(alone["offloaded"][stage - 1])


@pytest.mark.parametrize("which", range(4))
def test_a_spike_is_clipped_in_bfloat16(alone, which):
    check_spike(alone["bfloat16"][which], NEAR["bfloat16"])


def test_a_spike_is_clipped_in_float16(alone):
    unscaled, found = alone["float16"]
    check_spike(found, NEAR["float16"])
    # Without ZeRO, DeepSpeed 0.19.8 divides by a loss scale with which it has not multiplied, here 4.
    assert [norm for _, norm, _ in unscaled["seen"]] == pytest.approx([1.95] * 4 + [309.5], rel=NEAR["float16"])
    assert unscaled["seen"][-1][0] == pytest.approx(3.9, rel=NEAR["float16"])


@pytest.mark.parametrize("stage", range(4))
def test_two_ranks_clip_the_mean_of_their_gradients(two, stage):
    for found in two:
        check_spike(found["stages"][stage])
    assert two[0]["stages"] == two[1]["stages"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_with_an_offloaded_optimizer(two, stage):
    for found in two:
        check_spike(found["offloaded"][stage - 1])


@pytest.mark.parametrize("stage", range(4))
def test_only_updates_count_not_micro_batches(alone, two, stage):
    for found in (alone, *two):
        assert found["accumulation"][stage]["norms"] == [None, None, 5.0, 5.0, 5.0, 5.0]
        assert found["accumulation"][stage]["moved"] == pytest.approx(4.0, rel=1e-5)


@pytest.mark.parametrize("which", range(3))
def test_an_update_that_is_skipped_counts_as_skipped(alone, which):
    applied, counts, steps, skipped, observed = alone["not_finite"][which]
    assert applied == [1.0, 0.0, 1.0]
    assert counts == [3, 0, 1, 1]
    assert (steps, skipped, observed) == (3, 1, 2)


def test_a_fixed_threshold_can_be_assigned(alone):
    assert alone["fixed"]["applied"] == pytest.approx([2.0, 5.0, 0.5], rel=1e-5)
    assert alone["fixed"]["thresholds"] == [2.0, math.inf, 1.0]


@pytest.mark.parametrize("which", range(3))
def test_a_resumed_run_goes_on_to_the_last_bit(alone, which):
    at_once, resumed = alone["resumed"][2 * which : 2 * which + 2]
    assert resumed == at_once
    # 3, 4, 5 and 7 are applied, and then twice the median of these, which is 4.
    assert at_once == [8.0, 400.0] + [-13.5] * 4


def test_what_is_refused(alone):
    said = alone["refused"]
    assert said["twice"].startswith("ValueError: the updates of this engine clip already")
    assert said["zero"].startswith("ValueError: max_norm must be above 0, got 0.0: DeepSpeed takes 0")
    for name in ("skip_above", "assigned"):
        assert said[name].startswith("ValueError: DeepSpeed cannot skip steps with a large norm")
    assert said["a model"].startswith("TypeError: optimizer must be an optimizer of torch.optim")
    assert said["a tuple"].endswith("pass the first entry, the engine.")
    assert said["no norm"].startswith("ValueError: the engine does not measure the norm")
    assert said["no optimizer"].startswith("ValueError: the engine has no optimizer")
    for name in (f"{how}optimizer of stage {stage}" for how in ("", "guarded ") for stage in (1, 2, 3)):
        assert "call gradclip.clip_at_step with the engine" in said[name], name


@pytest.mark.parametrize("which", range(4))
def test_a_plain_call_on_what_the_engine_holds(alone, two, which):
    for of_process in (alone, *two):
        said, moved = of_process["plain_calls"][which]
        assert moved == pytest.approx(3.0, rel=1e-2)  # as if no call had been made
        for name, told in said.items():
            if name.endswith(", optimizer"):
                assert told.startswith("warning: "), name
                assert "no parameter has a gradient" in told
                assert "gradclip.clip_at_step(engine, max_norm)" in told
            elif not (which == 3 and name.endswith(", one of two")):  # there, the first parameter alone is looked at
                assert told.startswith("error: parameters["), name
                assert "DeepSpeed holds this gradient. Call gradclip.clip_at_step(engine, max_norm)" in told


def test_ranks_with_different_thresholds_both_raise(two):
    for rank, own in enumerate(("8.0", "5.0")):
        found = two[rank]["disagreeing"]
        assert found["told"].startswith(f"the ranks have different thresholds, from 5.0 to 8.0; here it is {own}.")
        assert found["moved"] == 0.0


def test_an_error_on_one_rank_reaches_the_other(two):
    assert two[1]["failing"].startswith("ValueError: max_norm must be above 0, got 0.0")
    assert two[0]["failing"].startswith("RuntimeError: clipping failed on another rank")
