import math
import os
import subprocess
import sys
import warnings
from collections import UserDict
from dataclasses import FrozenInstanceError, dataclass
from fractions import Fraction
from types import MappingProxyType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip
from gradclip.arguments import check_mask, check_threshold

TREE = {"w": np.array([3.0, 4.0])}
CALLS = {
    "global": lambda c: gradclip.clip_by_global_norm(TREE, c),
    "layer": lambda c: gradclip.clip_by_layer_norm(TREE, {"w": c}),
    "value": lambda c: gradclip.clip_by_value(TREE, c),
    "example": lambda c: gradclip.per_example_clip(TREE["w"], c),
    "in place": lambda c: gradclip.clip_grad_norm_(SimpleNamespace(grad=TREE["w"]), c),
    "value in place": lambda c: gradclip.clip_grad_value_(SimpleNamespace(grad=TREE["w"]), c),
    "layers in place": lambda c: gradclip.clip_grad_layer_norm_(SimpleNamespace(grad=TREE["w"]), c),
    "partial": lambda c: gradclip.partial_norm(TREE).clip(TREE, c),
    "sensitivity": lambda c: gradclip.clipped_sum_sensitivity(c),
    "at most": lambda c: gradclip.norm_at_most(TREE, c),
}
NO_NUMBERS = [
    True,
    np.True_,
    1j,
    np.complex64(1),
    "1",
    np.str_("1"),
    b"1",
    np.array(True),
    np.array(1j),
    np.array("1"),
    np.array(None),
    np.ma.array(1.0, mask=True),
    np.ma.masked,
    torch.tensor(True),
    torch.tensor(1j),
    jnp.array(True),
    jnp.array(1j),
]


@pytest.fixture(autouse=True)
def unchanged():
    yield
    assert TREE["w"].tolist() == [3.0, 4.0]


@pytest.mark.parametrize("bad", NO_NUMBERS, ids=repr)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_threshold_that_is_no_real_number_is_a_type_error(call, bad):
    with pytest.raises(TypeError):
        call(bad)


@pytest.mark.parametrize("huge", [10**400, Fraction(10) ** 400, -(10**400)])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_threshold_beyond_float64_is_a_value_error(call, huge):
    with pytest.raises(ValueError, match=r"max_norm|max_value|clip_value"):
        call(huge)


def test_an_order_beyond_float64_is_a_value_error():
    with pytest.raises(ValueError, match="ord must be"):
        gradclip.global_norm(TREE, 10**400)


@pytest.mark.parametrize("number", [Fraction(1, 3), Fraction(2, 3), 2**53 + 1, 2**53 + 3, np.int64(2**53 + 3)])
def test_a_threshold_is_never_rounded_up(number):
    exact = Fraction(int(number)) if isinstance(number, np.integer) else Fraction(number)
    assert 0 <= exact - Fraction(check_threshold(number)) < exact * Fraction(1, 2**52)


def test_a_traced_threshold_must_be_real():
    with pytest.raises(TypeError, match="max_norm must be a real number"):
        jax.jit(lambda c: gradclip.clip_by_global_norm(jnp.ones(3), c))(True)


MASKED = np.ma.array([3.0, 4.0], mask=[False, True])


@pytest.mark.parametrize(
    "call",
    [
        gradclip.global_norm,
        gradclip.layer_norms,
        gradclip.partial_norm,
        lambda x: gradclip.clip_by_global_norm(x, 1.0),
        lambda x: gradclip.clip_by_layer_norm(x, 1.0),
        lambda x: gradclip.clip_by_value(x, 1.0),
        lambda x: gradclip.per_example_clip(x, 1.0),
        lambda x: gradclip.norm_at_most(x, 1.0),
        lambda x: gradclip.clip_grad_norm_(x, 1.0),
        lambda x: gradclip.clip_grad_norm_({"w": np.ones(2), "x": x}, 1.0),
        lambda x: gradclip.clip_grad_norm_(SimpleNamespace(grad=x), 1.0),
        lambda x: gradclip.clip_grad_value_(SimpleNamespace(grad=x), 1.0),
    ],
)
def test_masked_arrays_do_not_lose_their_mask(call):
    before = MASKED.copy()
    with pytest.raises(TypeError, match=r"is a masked array, of which the mask would be lost\. Pass x\.filled\(0\)"):
        call(MASKED)
    assert MASKED.data.tolist() == before.data.tolist()


NO_MASKS = [
    "abc",
    b"abc",
    5,
    1.0,
    [0.5, 0.0, math.nan],
    [2, 0, 5],
    {True, False},
    {0: True},
    np.array([1, 0, 1]),
    np.array([1.0, 0.0, 1.0]),
    np.ma.array([True, False, True], mask=[0, 0, 1]),
    torch.tensor([1, 0, 1]),
    jnp.array([1.0, 0.0, 1.0]),
    [True, "x", False],
]


@pytest.mark.parametrize("bad", NO_MASKS, ids=repr)
def test_a_mask_must_hold_booleans(bad):
    with pytest.raises(TypeError, match="mask must hold booleans"):
        gradclip.per_example_clip(np.ones((3, 2)), 1.0, mask=bad)
    clipped = gradclip.clipped_grad(lambda w, x: (w @ x).sum(), 1.0)
    for w in (torch.ones(2), jnp.ones(2)):
        examples = torch.ones(3, 2) if isinstance(w, torch.Tensor) else jnp.ones((3, 2))
        with pytest.raises(TypeError, match="mask must hold booleans"):
            clipped(w, examples, mask=bad)


def test_masks_of_booleans_are_masks():
    for mask in ([True, False], (np.True_, False), np.array([True, False]), torch.tensor([True, False])):
        assert check_mask(mask) is mask
    assert gradclip.per_example_clip(np.ones((2, 1)), 9.0, mask=[True, False])[0].tolist() == [1.0]


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
            with pytest.raises(TypeError, match=r"parameters\[1\]\.grad cannot be written .* a Frozen, takes no"):
                call(holders)
            assert [np.asarray(h.grad).tolist() for h in holders] == [[3.0, 4.0], [12.0]]
    with pytest.raises(FrozenInstanceError):
        holders[1].grad = None


def test_a_frozen_holder_of_a_gradient_that_can_be_written_is_fine():
    holder = Frozen(np.array([3.0, 4.0]))
    gradclip.clip_grad_norm_([holder], 1.0)
    assert holder.grad.round(6).tolist() == [0.6, 0.8]


def tensors_of_other_kinds():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield "nested", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "unbind"
        yield "nested", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "unbind"
        yield "mkldnn", torch.ones(2, 3).to_mkldnn(), "to_dense"
        yield "quantized|quint8", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "dequantize|convert"


@pytest.mark.parametrize(("kind", "tensor", "instead"), list(tensors_of_other_kinds()))
def test_tensors_that_cannot_be_clipped_say_what_can(kind, tensor, instead):
    holder = SimpleNamespace(grad=tensor)
    for call in (
        lambda: gradclip.global_norm(tensor),
        lambda: gradclip.partial_norm(tensor),
        lambda: gradclip.clip_by_global_norm({"x": tensor}, 1.0),
        lambda: gradclip.clip_by_value(tensor, 1.0),
        lambda: gradclip.per_example_clip(tensor, 1.0),
        lambda: gradclip.clip_grad_norm_([holder], 1.0),
        lambda: gradclip.clip_grad_value_([holder], 1.0),
        lambda: gradclip.grad_norm([holder]),
    ):
        with pytest.raises(TypeError, match=f"({kind}).*({instead})"):
            call()


def test_what_numpy_is_told_to_do_about_errors_is_no_matter():
    tiny = gradclip.partial_norm(np.array([1e-320, 1e-320]), 1)
    tree = {"w": np.array([1e-320, 1e300, 0.0]), "h": np.array([1e-7, 6e4], np.float16)}
    with np.errstate(all="raise"):
        for ord in (1, 2, 3, math.inf):
            part = gradclip.partial_norm(tree, ord)
            assert math.isclose((part + part).norm, 2 ** (1 / ord) * 1e300, rel_tol=1e-9)
            part.clip(tree, 1e-300)
            gradclip.clip_by_global_norm(tree, 1e-300, ord=ord)
            gradclip.clip_by_layer_norm(tree, 1e-300, ord=ord)
            gradclip.layer_norms(tree, ord)
            gradclip.clip_grad_norm_({k: v.copy() for k, v in tree.items()}, 1e-300, ord)
        assert (tiny + tiny).norm == tiny.norm * 2 == tiny.clip(np.array([1e-320]), 1.0)[0] * 4
        gradclip.clip_by_value(tree, 1e-320)
        gradclip.per_example_clip(np.stack([tree["w"], tree["w"][::-1]]), 1e-300)
        gradclip.norm_at_most(tree, 1e300)
        gradclip.clipped_sum_sensitivity(1e-300)


@pytest.mark.parametrize("threads", ["2147483648", "9" * 5000, "0" * 5000 + "1", " 2 ", "٣", "-1", "1e3", ""])
def test_any_number_of_threads_that_is_asked_for_works(threads):
    code = "import numpy, gradclip; print(gradclip.global_norm(numpy.ones(4_000_000, numpy.float32)))"
    environment = os.environ | {"OMP_NUM_THREADS": threads}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2000.0"


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
    with pytest.raises(TypeError, match=r"^b is a int, which has no \.grad"):
        gradclip.grad_norm({"a": SimpleNamespace(grad=None), "b": 3})


def test_arrays_of_a_file_are_not_written_in_vain(tmp_path):
    np.savez(tmp_path / "update.npz", w=np.array([3.0, 4.0]))
    with np.load(tmp_path / "update.npz") as update:
        with pytest.raises(TypeError, match=r"parameters is a NpzFile.*Pass a dict: arrays = dict\(\.\.\.\)"):
            gradclip.clip_grad_norm_(update, 1.0)
        arrays = dict(update)
    assert gradclip.clip_grad_norm_(arrays, 1.0) == 5.0
    with pytest.raises(TypeError, match="UserDict"):
        gradclip.clip_grad_norm_(UserDict(arrays), 1.0)


class State:
    """A container as those of Flax: attributes, known to JAX alone."""

    def __init__(self, **items):
        self.items = items


jax.tree_util.register_pytree_with_keys(
    State,
    lambda s: ([(jax.tree_util.DictKey(k), s.items[k]) for k in sorted(s.items)], tuple(sorted(s.items))),
    lambda keys, values: State(**dict(zip(keys, values, strict=True))),
)


def test_a_plain_dict_of_thresholds_is_a_prefix_of_other_containers():
    state = State(
        a=State(w=jnp.array([3.0, 4.0]), b=jnp.array([12.0])),
        z=State(w=jnp.array([0.0, 8.0])),
    )
    clipped, norms = gradclip.clip_by_layer_norm(state, {"a": 6.5, "z": {"w": 4.0}})
    assert isinstance(clipped, State)
    assert np.allclose(clipped.items["a"].items["b"], [6.0])
    assert np.allclose(clipped.items["z"].items["w"], [0.0, 4.0])
    assert {"a": float(norms["a"]), "z": float(norms["z"]["w"])} == {"a": 13.0, "z": 8.0}
    norms = gradclip.layer_norms(state, prefix={"a": 0, "z": 0})
    assert {key: float(norm) for key, norm in norms.items()} == {"a": 13.0, "z": 8.0}
    batch = jax.tree.map(lambda x: x[None], state)
    _, info = gradclip.per_example_clip(batch, {"a": 6.5, "z": 4.0})
    assert set(info.norms) == {"a", "z"}
    for wrong in ({"a": 1.0}, {"a": 1.0, "z": 1.0, "x": 1.0}, {"a": {"w": 1.0}, "z": 1.0}):
        with pytest.raises(ValueError, match="prefix of the tree"):
            gradclip.clip_by_layer_norm(state, wrong)


def test_layer_norms_of_a_prefix():
    tree = {"a": {"w": np.array([3.0, 4.0]), "b": np.array([12.0])}, "z": np.array([2.0])}
    for prefix in ({"a": 1.0, "z": 2.0}, {"a": "any", "z": "thing"}):
        norms = gradclip.layer_norms(tree, prefix=prefix)
        assert {key: float(norm) for key, norm in norms.items()} == {"a": 13.0, "z": 2.0}
    assert float(gradclip.layer_norms(tree, 1, prefix=0)) == 21.0
    with pytest.raises(ValueError, match="prefix of the tree"):
        gradclip.layer_norms(tree, prefix={"b": 1.0})
