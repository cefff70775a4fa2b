"""Parameter groups with thresholds of their own, and thresholds by names: each part is clipped by its own norm."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gradclip
from frameworks import ALL, WITH_FLOAT32, by_name
from rational import at_most, random_leaf, random_threshold

EAGER = [framework for framework in WITH_FLOAT32 if not framework.jit]


def holders(framework, *grads):
    return [SimpleNamespace(grad=framework.array(grad)) for grad in grads]


def numbers(framework, *held):
    return [framework.to_numpy(one.grad).astype(float).round(5).tolist() for one in held]


@pytest.mark.parametrize("framework", EAGER, ids=by_name)
def test_each_part_is_clipped_by_its_own_norm(framework):
    with framework.mode():
        a, b, c, d, e = holders(framework, [3.0, 0.0], [0.0, 4.0], [6.0, 8.0], [0.3, 0.4], [30.0, 40.0])
        groups = [
            {"params": [a]},
            {"params": [c], "max_norm": 2.0},
            {"params": [b]},
            {"params": [d], "max_norm": 1.0},
            {"params": [e], "max_norm": None},
        ]
        norm = gradclip.clip_grad_norm_(groups, 1.0)
        # 3, 4 are 5 together; 10 is above 2, 0.5 is not above 1, 50 is only measured.
        assert float(norm) == pytest.approx(math.sqrt(25 + 100 + 0.25 + 2500), rel=1e-6)
        assert numbers(framework, a, b, c, d, e) == [[0.6, 0.0], [0.0, 0.8], [1.2, 1.6], [0.3, 0.4], [30.0, 40.0]]


@pytest.mark.parametrize("framework", EAGER, ids=by_name)
@pytest.mark.parametrize("ord", [1, 2, 3, "inf", "-inf"])
def test_the_norm_of_all_is_returned_as_without_thresholds(framework, ord):
    with framework.mode():
        made = holders(framework, [3.0, 0.0], [6.0, 8.0], [0.3, 0.4])
        groups = [{"params": [one], "max_norm": math.inf} for one in made]
        expected = float(gradclip.grad_norm(made, ord))
        assert float(gradclip.grad_norm(groups, ord)) == expected
        norm = gradclip.clip_grad_norm_([*groups, {"params": []}], 1.0, ord)
        assert float(norm) == pytest.approx(expected, rel=1e-6)
        assert numbers(framework, *made) == [[3.0, 0.0], [6.0, 8.0], [0.3, 0.4]]


@pytest.mark.parametrize("framework", EAGER, ids=by_name)
def test_thresholds_by_name(framework):
    with framework.mode():
        a, b, c = holders(framework, [3.0, 4.0], [6.0, 8.0], [5.0, 12.0])
        named = {"encoder.weight": a, "encoder.bias": b, "head": c}
        thresholds = {"*.bias": None, "encoder.*": framework.array(1.0), "*": 6.5}
        assert float(gradclip.clip_grad_norm_(named, thresholds)) == pytest.approx(math.sqrt(25 + 100 + 169), rel=1e-6)
        assert numbers(framework, a, b, c) == [[0.6, 0.8], [6.0, 8.0], [2.5, 6.0]]


def test_a_tree_of_arrays_has_names():
    tree = {"encoder": {"w": np.array([3.0, 4.0])}, "steps": np.array(7), "head": [np.array([5.0, 12.0])]}
    assert gradclip.clip_grad_norm_(tree, {"encoder.*": 1.0, "head.0": 6.5}) == pytest.approx(math.sqrt(194))
    assert tree["encoder"]["w"].round(6).tolist() == [0.6, 0.8]
    assert tree["head"][0].round(6).tolist() == [2.5, 6.0]
    assert tree["steps"] == 7


@pytest.mark.parametrize("framework", EAGER, ids=by_name)
def test_the_bound_of_each_part_is_exact(framework):
    rng = np.random.default_rng(5)
    for _ in range(25):
        dtypes = [str(rng.choice([name for name in framework.dtypes if "complex" not in name])) for _ in range(4)]
        leaves = [random_leaf(rng, dtype, int(rng.integers(1, 40))) for dtype in dtypes]
        split = [leaves[:2], leaves[2:3], leaves[3:]]
        limits = [random_threshold(rng, part, 2) for part in split]
        with framework.mode():
            made = [SimpleNamespace(grad=framework.from_numpy(leaf.copy())) for leaf in leaves]
            groups = [
                {"params": made[:1]},
                {"params": made[2:3], "max_norm": limits[1]},
                {"params": made[1:2]},
                {"params": made[3:], "max_norm": limits[2]},
            ]
            gradclip.clip_grad_norm_(groups, limits[0])
            results = [framework.to_numpy(one.grad) for one in made]
        for part, limit in zip((results[:2], results[2:3], results[3:]), limits, strict=True):
            assert at_most([np.asarray(one, np.float64) for one in part], 2, limit)


@pytest.mark.parametrize("framework", EAGER, ids=by_name)
def test_what_is_below_its_threshold_keeps_its_bits(framework):
    with framework.mode():
        a, b = holders(framework, [3.0, 4.0], [0.1, 0.7])
        gradclip.clip_grad_norm_([{"params": [a], "max_norm": 5.5}, {"params": [b]}], 0.25)
        assert framework.to_numpy(a.grad).tolist() == [3.0, 4.0]


@pytest.mark.parametrize("framework", EAGER, ids=by_name)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_in_one_part_counts_for_all(framework, bad):
    def clip(policy, where):
        grads = [[3.0, 4.0], [6.0, 8.0], [0.3, 0.4]]
        grads[where][0] = bad
        made = holders(framework, *grads)
        thresholds = ({}, {"max_norm": 2.0}, {"max_norm": None})
        groups = [{"params": [one], **own} for one, own in zip(made, thresholds, strict=True)]
        return gradclip.clip_grad_norm_(groups, 1.0, nonfinite=policy), numbers(framework, *made), made

    with framework.mode():
        for where in range(3):
            norm, results, _ = clip("propagate", where)
            assert not math.isfinite(float(norm))
            assert np.isnan(results).all()
            norm, results, _ = clip("drop", where)
            assert not math.isfinite(float(norm))
            assert results == [[0.0, 0.0]] * 3
            if not framework.traced:
                with pytest.raises(
                    FloatingPointError, match=rf"in 1 of 3 leaves: parameters\[{where}\]\['params'\]\[0\]"
                ):
                    clip("raise", where)
        assert clip("zero", 1)[1] == [[0.6, 0.8], [0.0, 2.0], [0.3, 0.4]]


@pytest.mark.parametrize("framework", EAGER, ids=by_name)
def test_an_adaptive_threshold_follows_the_norm_of_its_group(framework):
    own, common = gradclip.AdaptiveThreshold(skip_above=4.0), gradclip.AdaptiveThreshold(gradclip.QuantileRule())
    alone, beside = gradclip.AdaptiveThreshold(skip_above=4.0), gradclip.AdaptiveThreshold(gradclip.QuantileRule())
    with framework.mode():
        for size in (1.0, 2.0, 1.0, 100.0, 1.5):
            a, b, c, d = holders(
                framework, [3 * size, 4 * size], [0.6 * size, 0.8], [3 * size, 4 * size], [0.6 * size, 0.8]
            )
            gradclip.clip_grad_norm_([{"params": [a], "max_norm": own}, {"params": [b]}], common)
            gradclip.clip_grad_norm_([c], alone)
            gradclip.clip_grad_norm_([d], beside)
            assert numbers(framework, a, b) == numbers(framework, c, d)
        for one, other in ((own, alone), (common, beside)):
            assert one.state_dict() == other.state_dict()
    assert own.num_skipped == 1


@pytest.mark.parametrize("framework", EAGER, ids=by_name)
def test_a_step_that_is_not_finite_elsewhere_is_skipped_for_an_adaptive_threshold(framework):
    own = gradclip.AdaptiveThreshold(gradclip.QuantileRule())
    with framework.mode():
        for bad in (1.0, math.nan):
            a, b = holders(framework, [3.0, 4.0], [bad, 0.0])
            gradclip.clip_grad_norm_([{"params": [a], "max_norm": own}, {"params": [b]}], 1.0, nonfinite="drop")
    assert (own.steps, own.num_skipped, own.num_clipped, float(own.norm)) == (2, 1, 0, 5.0)


def groups_of(first, second, threshold=0.5):
    return [{"params": [first]}, {"params": [second], "max_norm": threshold}]


def test_frozen_layers_empty_groups_and_iterators():
    frozen, one, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    one.grad, other.grad = torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0])
    groups = (
        {"params": (p for p in (frozen, one))},
        {"params": iter([("other", other)]), "max_norm": 1.0},
        {"params": [], "max_norm": 1.0},
        {"params": [frozen], "max_norm": 1.0},
    )
    with pytest.raises(ValueError, match="occurs twice"):
        gradclip.clip_grad_norm_(groups, 2.5)
    groups = (
        {"params": (p for p in (frozen, one))},
        {"params": iter([("other", other)]), "max_norm": 1.0},
        {"params": [], "max_norm": 1.0},
    )
    norm = gradclip.clip_grad_norm_((group for group in groups), 2.5)
    assert float(norm) == pytest.approx(math.sqrt(125))
    assert one.grad.tolist() == pytest.approx([1.5, 2.0])
    assert other.grad.tolist() == pytest.approx([0.6, 0.8])
    assert frozen.grad is None


def test_no_gradient_at_all():
    frozen = torch.nn.Parameter(torch.zeros(2))
    with pytest.warns(UserWarning, match="no parameter has a gradient"):
        assert gradclip.clip_grad_norm_([{"params": [frozen], "max_norm": 1.0}, {"params": []}], 1.0) == 0.0


def test_gradients_that_share_memory_get_memory_of_their_own():
    shared = torch.tensor([3.0, 4.0])
    one, other = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    one.grad, other.grad = shared, shared
    gradclip.clip_grad_norm_(groups_of(one, other), 1.0)
    assert one.grad.tolist() == pytest.approx([0.6, 0.8])
    assert other.grad.tolist() == pytest.approx([0.3, 0.4])


@pytest.mark.parametrize("framework", [f for f in ALL if f.name == "torch-device"], ids=by_name)
def test_no_call_waits_for_a_device(framework):
    class NoLook(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert "_local_scalar_dense" not in str(func), "a look at a value waits for the device"
            assert "nonzero" not in str(func)
            return func(*args, **(kwargs or {}))

    own, monitor = gradclip.AdaptiveThreshold(skip_above=4.0), gradclip.Monitor(layers_every=1)
    with framework.mode():
        made = holders(framework, [3.0, 4.0], [6.0, 8.0], [1.0, 0.0])
        groups = [
            {"params": made[:1], "max_norm": own},
            {"params": made[1:2], "max_norm": torch.tensor(2.0)},
            {"params": made[2:]},
        ]
        with NoLook():
            for _ in range(3):
                gradclip.clip_grad_norm_(groups, 0.5, nonfinite="drop", monitor=monitor)
        assert numbers(framework, *made[1:]) == [[1.2, 1.6], [0.5, 0.0]]
    assert [one.last.norm for one in monitor.groups.values()] == [5.0, pytest.approx(2.0)]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_infinite_norms_of_finite_gradients(dtype):
    largest = float(np.finfo(dtype).max)
    one, other = (SimpleNamespace(grad=np.array(grad, dtype)) for grad in ([largest] * 4, [3.0, 4.0]))
    own = gradclip.AdaptiveThreshold(gradclip.QuantileRule())
    norm = gradclip.clip_grad_norm_([{"params": [one], "max_norm": own}, {"params": [other]}], 1.0, nonfinite="drop")
    assert norm == math.inf
    assert one.grad.tolist() == [largest] * 4
    assert other.grad.tolist() == pytest.approx([0.6, 0.8], rel=1e-6)
    assert (own.steps, own.num_skipped) == (1, 0)
