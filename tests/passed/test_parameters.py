"""Parameters as users have them: iterators, pairs of a name and a parameter, holders that take no gradient."""

import math
from collections import UserDict
from dataclasses import FrozenInstanceError, dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip


@pytest.mark.parametrize("make", [filter, map])
def test_an_exhausted_iterator_is_noticed(make):
    layers = [SimpleNamespace(grad=np.array([3.0, 4.0]))]
    used = make((lambda x: x) if make is map else None, layers)
    assert len(list(used)) == 1
    for parameters in (used, iter([])):
        with pytest.raises(ValueError, match="used up by an earlier loop"):
            gradclip.clip_grad_norm_(parameters, 1.0)


@dataclass(frozen=True)
class Frozen:
    grad: Any


@pytest.mark.after_error
def test_a_frozen_holder_is_noticed_before_anything_is_written():
    written, read_only = np.array([3.0, 4.0]), np.array([12.0])
    read_only.flags.writeable = False
    for grads in ((written, read_only), (written, jnp.array([12.0]))):
        if not isinstance(grads[1], np.ndarray):
            grads = (jnp.array([3.0, 4.0]), grads[1])
        holders = [SimpleNamespace(grad=grads[0]), Frozen(grads[1])]
        for call in (
            lambda p: gradclip.clip_grad_norm_(p, 1.0),
            lambda p: gradclip.clip_grad_value_(p, 1.0),
            lambda p: gradclip.clip_grad_layer_norm_(p, 1.0),
        ):
            with pytest.raises(TypeError, match=r"parameters\[1\]\.grad cannot be written .* a Frozen, does not"):
                call(holders)
            assert [np.asarray(h.grad).tolist() for h in holders] == [[3.0, 4.0], [12.0]]
    with pytest.raises(FrozenInstanceError):
        holders[1].grad = None


def test_a_frozen_holder_of_a_gradient_that_can_be_written_is_fine():
    holder = Frozen(np.array([3.0, 4.0]))
    gradclip.clip_grad_norm_([holder], 1.0)
    assert holder.grad.round(6).tolist() == [0.6, 0.8]


def measured_weights():
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    weight.grad = torch.tensor([1.0, 0.0])
    return {"w": weight}


@pytest.mark.parametrize(
    "call",
    [
        gradclip.global_norm,
        gradclip.layer_norms,
        lambda t: gradclip.clip_by_global_norm(t, 1.0),
        lambda t: gradclip.clip_by_layer_norm(t, 1.0),
    ],
)
def test_measuring_the_weights_of_parameters_with_gradients_warns(call):
    tree = measured_weights()
    with pytest.warns(UserWarning, match=r"the norm is that of the weights\. .*grad_norm or gradclip\.clip_grad_norm_"):
        call(tree)
    call({"w": tree["w"].detach()})
    call({"w": torch.nn.Parameter(torch.ones(2))})
    call([tree["w"].grad])


def test_parameters_come_with_names():
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(1, 1))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model[1].weight.grad[0, 0] = math.nan
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    for parameters in (
        model.named_parameters(),
        list(model.named_parameters()),
        dict(model.named_parameters()),
        MappingProxyType(dict(model.named_parameters())),
        optimizer.param_groups,
        [{"params": list(model.named_parameters())}],
    ):
        with pytest.raises(FloatingPointError, match=r"1 of 4 leaves: 1\.weight\.grad: 1 NaN"):
            gradclip.clip_grad_norm_(parameters, 1.0, nonfinite="raise")
    model[1].weight.grad[0, 0] = 1.0
    assert float(gradclip.clip_grad_norm_(model.named_parameters(), 1.0)) == float(np.float32(math.sqrt(5)))
    assert float(gradclip.grad_norm(model.parameters())) <= 1.0


def test_names_are_told_of_what_has_no_gradient():
    with pytest.raises(TypeError, match=r"^b is of type int, which has no \.grad"):
        gradclip.grad_norm({"a": SimpleNamespace(grad=None), "b": 3})


def test_arrays_of_a_file_are_not_written_in_vain(tmp_path):
    np.savez(tmp_path / "update.npz", w=np.array([3.0, 4.0]))
    with np.load(tmp_path / "update.npz") as update:
        with pytest.raises(TypeError, match=r"parameters is a NpzFile.*Make a dict, arrays = dict\(\.\.\.\)"):
            gradclip.clip_grad_norm_(update, 1.0)
        arrays = dict(update)
    assert gradclip.clip_grad_norm_(arrays, 1.0) == 5.0
    with pytest.raises(TypeError, match="UserDict"):
        gradclip.clip_grad_norm_(UserDict(arrays), 1.0)


@pytest.mark.parametrize("scalar", [jnp.ones(()), jax.random.key(0)])
def test_scalars_of_jax_are_no_parameters(scalar):
    with pytest.raises(TypeError, match=r"parameters must be an iterable of objects with a \.grad"):
        gradclip.grad_norm(scalar)
