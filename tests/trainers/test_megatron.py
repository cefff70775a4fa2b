"""Megatron-Core's optimizers clip to the threshold that `clip_at_step` sets: what was applied shows in the weights."""

import math
from pathlib import Path

import pytest

from processes import run

WORKER = Path(__file__).with_name("megatron_worker.py")
ALONE = ("chained", "single", "not_finite", "fixed", "sharing", "resumed", "refused", "plain_calls")
TOGETHER = ("chained", "splits", "resumed", "disagreeing", "failing")
NEAR = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
SHARDED = "DistributedOptimizer"
WHOLE = {
    "float32": "FP32Optimizer",
    "bfloat16": "Float16OptimizerWithFloat16Params",
    "float16": "Float16OptimizerWithFloat16Params",
}
CHAINED = [(dtype, ["ChainedOptimizer", inner]) for dtype, optimizer in WHOLE.items() for inner in (optimizer, SHARDED)]
SINGLE = [("float32", "FP32Optimizer"), ("float16", "Float16OptimizerWithFloat16Params"), ("float32", SHARDED)]
SPLITS = [[inner] * count for count in (1, 1, 2) for inner in ("FP32Optimizer", SHARDED)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run(WORKER, tmp_path_factory.mktemp("alone"), 1, ALONE)[0]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run(WORKER, tmp_path_factory.mktemp("two"), 2, TOGETHER)


def check_spike(found, optimizers, near=NEAR["float32"]):
    assert found["optimizers"] == optimizers
    applied, norms, thresholds, reported = zip(*found["seen"], strict=True)
    assert norms == pytest.approx([7.8] * 4 + [1238.0], rel=near)
    assert norms == reported
    assert thresholds[0] == math.inf
    assert thresholds[1:] == pytest.approx([15.6] * 4, rel=near)
    assert applied == pytest.approx([7.8] * 4 + [15.6], rel=near)
    assert found["counts"] == [5, 1, 0, 0]
    assert found["recorded"] == [[norm, threshold] for norm, threshold in zip(norms, thresholds, strict=True)]
    assert found["after"] == pytest.approx(3.0, rel=near)
    assert not found["left"]


@pytest.mark.parametrize("which", range(len(CHAINED)))
def test_a_spike_is_clipped(alone, which):
    dtype, optimizers = CHAINED[which]
    check_spike(alone["chained"][which], optimizers, NEAR[dtype])


@pytest.mark.parametrize("which", range(len(SINGLE)))
def test_a_spike_is_clipped_by_an_optimizer_that_is_in_no_chain(alone, which):
    dtype, optimizer = SINGLE[which]
    check_spike(alone["single"][which], [optimizer], NEAR[dtype])


@pytest.mark.parametrize("which", range(len(CHAINED)))
def test_two_ranks_clip_the_mean_of_their_gradients(two, which):
    dtype, optimizers = CHAINED[which]
    for found in two:
        check_spike(found["chained"][which], optimizers, NEAR[dtype])
    assert two[0]["chained"][which] == two[1]["chained"][which]


@pytest.mark.parametrize("which", range(len(SPLITS)))
def test_two_ranks_clip_a_model_whose_tensors_stages_or_experts_are_split(two, which):
    for found in two:
        check_spike(found["splits"][which], ["ChainedOptimizer", *SPLITS[which]])
    assert two[0]["splits"][which] == two[1]["splits"][which]


def test_an_update_that_overflows_counts_as_skipped(alone):
    seen, *counted = alone["not_finite"][1]
    assert seen == [pytest.approx([1.0, True, 1.0]), [0.0, False, math.inf], pytest.approx([1.0, True, 1.0])]
    assert counted == [[3, 0, 1, 1], 3, 1, 2]


@pytest.mark.parametrize("which", [0, 2])
def test_without_a_loss_scale_megatron_applies_what_is_not_finite(alone, which):
    seen, *counted = alone["not_finite"][which]
    assert seen[1] == pytest.approx([math.nan, True, math.nan], nan_ok=True)
    assert counted == [[3, 0, 0, 1], 3, 0, 2]


def test_a_fixed_threshold_can_be_assigned_where_megatron_itself_clips_nothing(alone):
    assert alone["fixed"]["applied"] == pytest.approx([2.0, 5.0, 0.5, 5.0], rel=1e-5)
    assert alone["fixed"]["thresholds"] == [2.0, math.inf, 1.0]


def test_another_optimizer_with_the_same_configuration_keeps_its_threshold(alone):
    assert alone["sharing"]["failed"].startswith("TypeError")
    assert alone["sharing"]["applied"] == pytest.approx([2.0, 3.0, 3.0, 4.0, 2.0, 4.0], rel=1e-5)


@pytest.mark.parametrize("which", range(3))
def test_a_resumed_run_goes_on_to_the_last_bit(alone, two, which):
    for found in (alone, *two):
        at_once, resumed = found["resumed"][2 * which : 2 * which + 2]
        assert resumed == at_once
        # 3, 4, 5 and 7 are applied, and then twice the median of these, which is 4.
        assert at_once == pytest.approx([8.0, 400.0] + [-13.5] * 4)


def test_what_is_refused(alone):
    said = alone["refused"]
    assert said["twice"].startswith("ValueError: the steps of this optimizer clip already")
    assert said["zero"].startswith("ValueError: max_norm must be above 0, got 0.0: This Megatron-Core takes 0")
    for name in ("skip_above", "assigned"):
        assert said[name].startswith("ValueError: This Megatron-Core cannot skip steps with a large norm")
    for name in ("None", "a model", "a configuration"):
        assert said[name].startswith("TypeError: optimizer must be an optimizer of torch.optim")
    assert len(said["guarded"]) == 6
    for told in said["guarded"]:
        assert told.startswith("TypeError: ")
        assert told.endswith("or with what Megatron's get_megatron_optimizer returns.")


@pytest.mark.parametrize("which", range(3))
def test_a_plain_call_on_what_the_optimizer_holds(alone, which):
    said, moved = alone["plain_calls"][which]
    assert moved == pytest.approx(3.0, rel=1e-3)  # as if no call had been made
    assert len(said) == 21
    for name, told in said.items():
        if name.endswith(", optimizer") and which > 0:
            assert "gradclip.clip_at_step(" in told, name
        else:
            assert told.startswith("error: parameters["), name
            assert "it lies in .main_grad, as in Megatron. Call gradclip.clip_at_step(optimizer, max_norm)" in told, (
                name
            )


def test_ranks_with_different_thresholds_both_raise(two):
    for found in two:
        assert found["disagreeing"]["told"].startswith("RuntimeError: the ranks have different thresholds, from 5.0 to")
        assert found["disagreeing"]["moved"] == 0.0


def test_an_error_on_one_rank_reaches_the_other(two):
    assert two[1]["failing"].startswith("ValueError: max_norm must be above 0, got 0.0")
    assert two[0]["failing"].startswith("RuntimeError: clipping failed on another rank")
