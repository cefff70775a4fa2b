"""What is recorded is checked at once, and fetched later, all together."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

import gradclip
from gradclip._src.monitor.pending import Pending
from gradclip._src.monitor.pending import resolved as seen
from gradclip.integrations.optax import clip_by_global_norm_with_state


def resolved(pending, first):
    return (one.step for one in seen(pending, first))


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
    pending = [Pending.of(np.array([np.nan, 3.0]), 1.0, None, policy, None) for policy in ("drop", "zero")]
    assert [step.skipped for step in resolved(pending, 1)] == [True, False, False, False]


def test_a_threshold_that_follows_is_asked_for_that_of_its_last_call():
    holder = SimpleNamespace(max_norm=torch.tensor(2.0), skip_above=10.0)
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


def test_a_holder_that_has_clipped_nothing_is_told_so():
    with pytest.raises(TypeError, match="max_norm has clipped nothing yet"):
        steps((5.0, gradclip.AdaptiveThreshold()))


def test_norms_of_layers_are_no_norm_and_the_way_out_works():
    norms = [torch.tensor(5.0), torch.tensor(1.0)]
    with pytest.raises(TypeError, match=r"norm must .* monitor.record\(gradclip.global_norm\(norms, math.inf"):
        steps((norms, 1.0))
    (step,) = steps((gradclip.global_norm(norms, math.inf), 1.0, norms))
    assert (step.norm, step.clipped, step.layers.norms.tolist()) == (5.0, True, [5.0, 1.0])


def test_a_vector_of_layers_is_checked_when_it_is_recorded():
    for norm, layers in ((5.0, np.ones(3)), (5.0, np.ones((2, 1))), (np.ones(3), np.ones(6)), (np.ones(3), np.ones(2))):
        with pytest.raises(ValueError, match=r"layer_norms must be a vector for one step, of shape \(2,\)"):
            Pending.of(norm, 1.0, layers, "propagate", ("a", "b"))
    with pytest.raises(ValueError, match="For a vector of the layers at one step, pass names="):
        Pending.of(5.0, 1.0, np.ones(3), "propagate", None)
    with pytest.raises(TypeError, match="norm must be a number or an array"):
        Pending.of(np.array(["5"]), 1.0, None, "propagate", None)


@pytest.mark.parametrize("name", ["norm", "max_norm"])
@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_what_is_changed_afterwards_was_recorded_before(make, name):
    value, other = make(4.0), 1.0
    pending = Pending.of(*((value, other) if name == "norm" else (other, value)), None, "propagate", None)
    value *= 0.5
    (step,) = resolved([pending], 1)
    assert getattr(step, name) == 4.0


@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])
@pytest.mark.parametrize("named", [True, False])
def test_norms_of_layers_that_are_changed_afterwards_were_recorded_before(make, named):
    buffer = make([4.0, 5.0])
    norms = buffer if named else {"a": buffer[0:1], "b": buffer[1:]}
    norm = 5.0 if named else make([5.0])
    pending = Pending.of(norm, 1.0, norms, "propagate", ("a", "b") if named else None)
    buffer *= 0.0
    (step,) = resolved([pending], 1)
    assert step.layers.norms.tolist() == [4.0, 5.0]


@pytest.mark.parametrize("value", [1j, 10**400, np.complex64(2), torch.tensor(1j), np.zeros((), "V4")])
def test_what_is_no_real_number_is_refused_before_it_is_kept(value):
    with pytest.raises(TypeError, match="norm must be a number or an array"):
        Pending.of(value, 1.0, None, "propagate", None)


@pytest.mark.parametrize("factor", [0.5, math.nan, -1])
def test_a_factor_that_no_call_takes(factor):
    with pytest.raises(ValueError, match="skip_above must be from 1"):
        Pending.of(5.0, 1.0, None, "propagate", None, factor)


@pytest.mark.parametrize("names", ["ab", [1, 2], 3, [None]])
def test_names_are_strings(names):
    with pytest.raises(TypeError, match="names must be the names of the layers, a list of strings"):
        gradclip.Monitor().record(5.0, 1.0, layer_norms=np.ones(2), names=names)
    with pytest.raises(TypeError, match="names are those of a vector of layer_norms"):
        gradclip.Monitor().record(5.0, 1.0, names=["a"])


def test_what_jax_deletes_was_recorded_before():
    update = jax.jit(lambda state: (state[0] + 1, state[1]), donate_argnums=0)
    state, pending = (jnp.float32(4.0), jnp.float32(1.0)), []
    for _ in range(3):
        pending.append(Pending.of(*state, None, "propagate", None))
        state = update(state)
    assert [step.norm for step in resolved(pending, 1)] == [4.0, 5.0, 6.0]


def test_no_two_layers_have_the_same_name():
    tree = {"a": {"b": 2.0}, "a.b": 3.0}
    (step,) = steps((5.0, 1.0, tree))
    assert step.layers.names == ("a.b", "a.b (2)")
    pending = Pending.of(5.0, 1.0, np.arange(4.0), "propagate", ("w", "w", "w (2)", "w"))
    (step,) = resolved([pending], 1)
    assert step.layers.names == ("w", "w (2)", "w (2) (2)", "w (3)")


def test_norms_of_layers_beyond_float32():
    (step,) = steps((1e200, 1.0, {"a": 1e200, "b": 2.0}))
    assert step.layers.norms.tolist() == [1e200, 2.0]
    (step,) = steps((5.0, 1.0, {"a": math.inf, "b": 2.0}))
    assert step.layers.norms.dtype == np.float32


def test_a_spike_that_the_call_has_skipped():
    pending = Pending.of(np.array([39.0, 41.0]), 10.0, None, "propagate", None, skip_above=4.0)
    assert [step.skipped for step in resolved([pending], 1)] == [False, True]


def test_traced_values_are_refused_with_the_way_out():
    with pytest.raises(TypeError, match=r"norm is traced: .* record it outside"):
        jax.jit(lambda norm: steps((norm, 1.0)))(1.0)
    with pytest.raises(TypeError, match="layer_norms is traced"):
        jax.jit(lambda norms: Pending.of(5.0, 1.0, norms, "propagate", ("a", "b")))(jnp.ones(2))


def test_variables_of_nnx_are_recorded_as_the_arrays_they_hold():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    chain = optax.chain(clip_by_global_norm_with_state(1.0), optax.sgd(0.1))
    optimizer = nnx.Optimizer(model, chain, wrt=nnx.Param)
    gradients = nnx.grad(lambda model: 100 * model(jnp.ones((1, 2))).sum())(model)
    optimizer.update(model, gradients)
    monitor = gradclip.Monitor()
    monitor.record(*optimizer.opt_state[0])
    assert (monitor.num_clipped, monitor.last.max_norm) == (1, 1.0)
    assert monitor.last.norm == pytest.approx(float(gradclip.global_norm(nnx.to_pure_dict(gradients))))


def test_whatever_has_a_norm_and_a_threshold_is_recorded_alone():
    max_norm, monitor = gradclip.AdaptiveThreshold(gradclip.QuantileRule(), skip_above=4.0), gradclip.Monitor()
    for norm in (1.0, 3.0, 90.0):
        max_norm.observe(norm)
        monitor.record(max_norm)
    monitor.record(SimpleNamespace(norm=5.0, max_norm=1.0), skip_above=4.0)
    assert [(one.norm, one.max_norm, one.skipped) for one in monitor.records] == [
        (1.0, math.inf, False),
        (3.0, 2.0, False),
        (90.0, 2.0, True),
        (5.0, 1.0, True),
    ]
    for state in (1.0, np.ones(()), gradclip.QuantileRule()):
        with pytest.raises(TypeError, match=r"max_norm is missing\. Pass record\(norm, max_norm\)"):
            monitor.record(state)
    assert monitor.steps == 4
