"""A spike reads like a sentence."""

import math

import numpy as np

from gradclip._src.monitor.records import LayerOfSpike, Spike, rounded

HEAD = LayerOfSpike("head", 40.0, 0.8, 100.0, 149)
BODY = LayerOfSpike("body", 20.0, 0.2, math.nan, 151)


def test_a_spike_names_the_layers_that_made_it():
    spike = Spike(151, 44.72, 0.5, 3.25, [7, 9], (HEAD, BODY))
    assert str(spike) == (
        "Step 151: the norm was 44.72, 89.4 times the level before (0.5). It came mostly from head (80% of its square, "
        "norm 40, 100 times its usual norm, since step 149), body (20% of its square, norm 20, since step 151). The "
        "loss was 3.25. Context: [7, 9]."
    )
    assert (spike.finite, spike.since, round(spike.times, 1)) == (True, 149, 89.4)


def test_a_layer_with_a_small_share_is_left_out():
    assert "body" not in str(Spike(2, 40.0, 1.0, layers=(HEAD, BODY._replace(share=0.05))))


def test_a_spike_without_layers():
    assert str(Spike(1500, 44.72, 0.5)) == "Step 1,500: the norm was 44.72, 89.4 times the level before (0.5)."
    assert Spike(1500, 44.72, 0.5).since == 1500


def test_layers_that_are_not_finite_are_named():
    broken = [LayerOfSpike(f"layer{i}", math.nan, math.nan, math.nan, 7) for i in range(5)]
    spike = Spike(7, math.nan, 0.5, layers=(*broken, HEAD), skipped=True)
    assert not spike.finite
    assert str(spike) == (
        "Step 7: the norm was nan, and the step was skipped. Not finite: layer0 (nan, since step 7), layer1 (nan, "
        "since step 7), layer2 (nan, since step 7) and 2 more, 5 of 6 layers."
    )


def test_what_zero_and_raise_leave_behind():
    broken = LayerOfSpike("head", math.inf, math.nan, math.nan, 7)
    assert str(Spike(7, 2.0, 0.5, layers=(broken,))).startswith(
        "Step 7: the gradients held NaN or infinity, and the norm of the rest was 2. Not finite: head (inf, since"
    )
    assert str(Spike(7, math.nan, 0.5, raised=True)) == (
        "Step 7: clipping raised, because the gradients hold NaN or infinity."
    )


def test_a_long_context_is_cut():
    told = str(Spike(1, 9.0, 0.5, context=np.arange(100).reshape(50, 2)))
    assert told.endswith("....")
    assert "\n" not in told
    assert len(told) < 220


def test_factors_are_short():
    assert [rounded(x) for x in (9.876, 446.4, 12345.6, 1.5e7)] == ["9.88", "446", "12,346", "1.5e+07"]
