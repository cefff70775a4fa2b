"""What is recorded is checked at once, and fetched later, all together."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from gradclip.monitor.pending import Pending, resolved


def steps(*records):
    pending = [Pending.of(*(*record, None, None)[:3], "propagate", None) for record in records]
    return list(resolved(pending, 1))


@pytest.mark.parametrize("make", [np.float32, jnp.float32, torch.tensor, float], ids=["numpy", "jax", "torch", "float"])
def test_scalars_of_every_framework(make):
    (step,) = steps((make(5.0), make(2.0)))
    assert (step.step, step.norm, step.max_norm, step.layers) == (1, 5.0, 2.0, None)
    assert type(step.norm) is type(step.max_norm) is float


def test_a_vector_is_several_steps_with_their_layers():
    norms, layers = jnp.array([1.0, 2.0, 3.0]), {"a": jnp.array([1.0, 2.0, 3.0]), "b": [jnp.array([4.0, 5.0, 6.0])]}
    found = steps((norms, 2.0, layers), (jnp.array([7.0]), jnp.array([8.0])))
    assert [step.step for step in found] == [1, 2, 3, 4]
    assert [(step.norm, step.max_norm) for step in found] == [(1, 2), (2, 2), (3, 2), (7, 8)]
    assert found[1].layers.names == ("a", "b.0")
    assert found[1].layers.norms.tolist() == [2.0, 5.0]
    assert found[3].layers is None


def test_a_vector_of_the_layers_of_one_step_takes_names():
    pending = Pending.of(5.0, 1.0, np.array([3.0, 4.0]), "propagate", ("a", "['b']"))
    (step,) = resolved([pending], 9)
    assert (step.step, step.layers.names, step.layers.norms.tolist()) == (9, ("a", "b"), [3.0, 4.0])


def test_a_single_layer_has_a_name():
    (step,) = steps((5.0, 1.0, np.float32(3.0)))
    assert step.layers.names == ("all",)


def test_steps_that_are_not_finite_are_skipped_under_skip():
    pending = [Pending.of(np.array([np.nan, 3.0]), 1.0, None, policy, None) for policy in ("skip", "zero")]
    assert [step.skipped for step in resolved(pending, 1)] == [True, False, False, False]


def test_a_threshold_that_follows_is_asked_for_that_of_its_last_call():
    holder = SimpleNamespace(threshold=torch.tensor(2.0), skip_above=10.0)
    found = [*resolved([Pending.of(norm, holder, None, "propagate", None) for norm in (19.0, 21.0)], 1)]
    assert [step.max_norm for step in found] == [2.0, 2.0]
    assert [step.skipped for step in found] == [False, True]


def test_what_cannot_be_recorded():
    with pytest.raises(TypeError, match=r"norm must be a number or an array, got 'five' of type str"):
        steps(("five", 1.0))
    with pytest.raises(TypeError, match="max_norm must be a number or an array, got None"):
        steps((5.0, None))
    with pytest.raises(TypeError, match=r"norm must be a scalar, or a vector .* got shape \(2, 2\)"):
        steps((np.ones((2, 2)), 1.0))
    with pytest.raises(ValueError, match=r"max_norm must have the shape of norm, \(3,\), got \(2,\)"):
        steps((np.ones(3), np.ones(2)))
    with pytest.raises(ValueError, match=r"layer_norms must have the shape of norm, \(3,\), got \(\)"):
        steps((np.ones(3), 1.0, {"a": 1.0}))
    with pytest.raises(ValueError, match="nonfinite must be"):
        Pending.of(5.0, 1.0, None, "ignore", None)


def test_traced_values_are_refused_with_the_way_out():
    with pytest.raises(TypeError, match=r"norm is traced: .* record it outside"):
        jax.jit(lambda norm: steps((norm, 1.0)))(1.0)
