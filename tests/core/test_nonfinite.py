import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip
from frameworks import ALL, by_name
from gradclip._src.core import nonfinite

# Beyond 2**126 times the threshold a float32 multiplier has fewer digits.
TIGHT = 1e-5
BAD = [1.0, np.nan, -np.inf, 4.0]


def clip(framework, tree, nonfinite):
    function = lambda t: gradclip.clip_by_global_norm(t, 1.0, nonfinite=nonfinite)
    clipped, norm = framework.call(function, tree)
    return framework.numbers(clipped), float(norm)


def test_propagate_is_the_default_and_spoils_everything(framework):
    tree = {"a": framework.array(BAD), "b": framework.array([2.0])}
    clipped, norm = framework.call(lambda t: gradclip.clip_by_global_norm(t, 1.0), tree)
    assert not np.isfinite(float(norm))
    assert np.isnan(framework.to_numpy(clipped["a"])).all()
    assert np.isnan(framework.to_numpy(clipped["b"])).all()


def test_propagate_holds_for_an_infinite_threshold(framework):
    tree = framework.array([1.0, np.inf])
    clipped, _ = framework.call(lambda t: gradclip.clip_by_global_norm(t, float("inf")), tree)
    assert np.isnan(framework.to_numpy(clipped)).all()


def test_zero_clips_the_rest(framework):
    clipped, norm = clip(framework, {"a": framework.array([3.0, np.nan, -np.inf, 4.0])}, "zero")
    assert norm == 5.0
    np.testing.assert_allclose(clipped["a"], [0.6, 0.0, 0.0, 0.8], rtol=2e-7)


def test_zero_keeps_the_rest_below_the_threshold(framework):
    clipped, _ = clip(framework, framework.array([0.5, np.inf]), "zero")
    assert clipped.tolist() == [0.5, 0.0]


def test_drop_makes_zeros(framework):
    clipped, norm = clip(framework, {"a": framework.array(BAD), "b": framework.array([2.0])}, "drop")
    assert not np.isfinite(norm)
    assert clipped["a"].tolist() == [0.0] * 4
    assert clipped["b"].tolist() == [0.0]


def test_a_word_of_steps_and_one_of_calls_explain_each_other():
    parameter, tree = torch.nn.Parameter(torch.ones(2)), {"w": np.ones(2)}
    parameter.grad = torch.ones(2)
    for call in (
        lambda: gradclip.clip_by_global_norm(tree, 1.0, nonfinite="skip"),
        lambda: gradclip.clip_grad_norm_([parameter], 0.5, nonfinite="skip"),
        lambda: gradclip.per_example_clip(tree, 1.0, nonfinite="skip"),
    ):
        with pytest.raises(
            ValueError, match=r"'skip' is for gradclip.clip_at_step, .* Here 'drop' makes zeros, or leaves"
        ):
            call()
    assert parameter.grad.tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"Here the step can be skipped: pass 'skip'"):
        nonfinite.Nonfinite.of_steps("drop")
    with pytest.raises(ValueError, match=r"got \[\]\.$"):
        nonfinite.Nonfinite.named([])


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_drop_makes_zeros_under_an_infinite_threshold(framework, bad):
    tree = {"a": framework.array([bad, 1.0]), "b": framework.array([2.0, 3.0])}
    every = framework.call(lambda t: gradclip.clip_by_global_norm(t, math.inf, nonfinite="drop")[0], tree)
    alone = framework.call(lambda t: gradclip.clip_by_layer_norm(t, math.inf, nonfinite="drop")[0], tree)
    units = framework.call(lambda t: gradclip.clip_by_unit_norm(t, math.inf, nonfinite="drop")[0], tree)
    assert [framework.to_numpy(x).tolist() for x in every.values()] == [[0.0, 0.0], [0.0, 0.0]]
    assert [framework.to_numpy(x).tolist() for x in alone.values()] == [[0.0, 0.0], [2.0, 3.0]]
    assert [framework.to_numpy(x).tolist() for x in units.values()] == [[0.0, 0.0], [2.0, 3.0]]


@pytest.mark.parametrize("nonfinite", ["propagate", "zero", "drop"])
def test_finite_gradients_whose_squares_overflow_are_finite(framework, nonfinite):
    clipped, _ = clip(framework, framework.array([3e38, -3e38]), nonfinite)
    np.testing.assert_allclose(
        clipped, [0.5**0.5, -(0.5**0.5)], rtol=TIGHT if framework.name == "torch-device" else 2e-7
    )


@pytest.mark.after_error
@pytest.mark.parametrize("framework", [f for f in ALL if not f.jit and "float32" in f.dtypes], ids=by_name)
def test_raise_names_the_leaves_and_counts(framework):
    tree = {"good": framework.array([2.0]), "bad": [framework.array(BAD)]}
    before = framework.numbers(tree)
    with pytest.raises(FloatingPointError, match=r"in 1 of 2 leaves: \['bad'\]\[0\]: 1 NaN, 1 infinite of 4 elements"):
        framework.call(lambda t: gradclip.clip_by_global_norm(t, 1.0, nonfinite="raise"), tree)
    np.testing.assert_array_equal(framework.numbers(tree)["bad"][0], before["bad"][0])


def test_raise_leaves_finite_gradients_alone(framework):
    if framework.jit:
        with pytest.raises(ValueError, match="outside jit"):
            clip(framework, framework.array([3.0, 4.0]), "raise")
        return
    np.testing.assert_allclose(clip(framework, framework.array([3.0, 4.0]), "raise")[0], [0.6, 0.8], rtol=2e-7)


def test_raise_cannot_be_traced_by_vmap():
    with pytest.raises(ValueError, match="outside jit"):
        jax.vmap(lambda x: gradclip.clip_by_global_norm(x, 1.0, nonfinite="raise"))(jnp.ones((2, 2)))
    with pytest.raises(ValueError, match="outside jit"):
        torch.func.vmap(lambda x: gradclip.clip_by_global_norm(x, 1.0, nonfinite="raise"))(torch.ones(2, 2))


@pytest.mark.parametrize("nonfinite", ["ignore", None, True, 0, "", "RAISE"])
def test_other_policies_are_refused(framework, nonfinite):
    with pytest.raises(ValueError, match="nonfinite must be one of 'propagate', 'raise', 'zero', 'drop'"):
        gradclip.clip_by_global_norm(framework.array([1.0]), 1.0, nonfinite=nonfinite)


def test_each_layer_has_its_own_policy(framework):
    tree = {"good": framework.array([3.0, 4.0]), "bad": framework.array(BAD)}
    function = lambda t: gradclip.clip_by_layer_norm(t, 1.0, nonfinite="drop")[0]
    clipped = framework.numbers(framework.call(function, tree))
    np.testing.assert_allclose(clipped["good"], [0.6, 0.8], rtol=2e-7)
    assert clipped["bad"].tolist() == [0.0] * 4


def test_a_policy_is_known_by_its_effects_and_not_by_its_name(monkeypatch):
    monkeypatch.setitem(nonfinite._POLICIES, "drop", nonfinite.Nonfinite("drop", blanks=True))
    monitor = gradclip.Monitor()
    monitor.record(math.nan, 1.0, nonfinite="drop")
    assert (monitor.num_skipped, monitor.num_nonfinite) == (1, 1)
    weight = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    guarded = gradclip.guard(optimizer, 1.0)
    weight.grad = torch.tensor([math.nan, 3.0])
    gradclip.clip_grad_norm_([weight], 1.0, nonfinite="drop")
    with pytest.warns(gradclip.ClippingWarning, match="A step was skipped"):
        optimizer.step()
    assert guarded.num_skipped == 1
    guarded.remove()
