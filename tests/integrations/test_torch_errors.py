"""The names of `torch.nn.utils` where they are called by mistake: what is said, and that nothing has been changed."""

import math
import warnings

import pytest
import torch

from gradclip.integrations import torch as named_as_torch
from gradclip.integrations.torch import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

FIVE = torch.tensor(5.0)
CALLS = {
    "norm": lambda ps, limit=1.0: clip_grad_norm_(ps, limit),
    "value": lambda ps, limit=1.0: clip_grad_value_(ps, limit),
    "with_norm": lambda ps, limit=1.0: clip_grads_with_norm_(ps, limit, FIVE),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def parameter(values, dtype=torch.float32):
    made = torch.nn.Parameter(torch.zeros(len(values), dtype=dtype))
    made.grad = torch.tensor(values, dtype=dtype)
    return made


@pytest.fixture
def pair():
    """Two parameters whose gradients must be unchanged, bit for bit and unwritten, when the test is over."""
    made = [parameter([3.0, math.inf]), parameter([4.0])]
    made[0].grad[1] = 0.0
    grads = [(p.grad, p.grad.clone(), p.grad._version) for p in made]
    yield made
    for p, (grad, before, version) in zip(made, grads, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, before)
        assert grad._version == version


@every_call
@pytest.mark.parametrize("limit", [-1.0, -math.inf, math.nan, torch.tensor(-1.0), torch.tensor(math.nan)], ids=repr)
def test_negative_and_nan_thresholds(call, limit, pair):
    with pytest.raises(ValueError, match=r"must not be negative or NaN, got (-1\.0|-inf|nan)"):
        call(pair, limit)


@every_call
@pytest.mark.parametrize("limit", [None, "one", torch.tensor([1.0, 2.0])], ids=repr)
def test_thresholds_that_are_no_numbers(call, limit, pair):
    with pytest.raises(TypeError, match="must be a real number or a scalar array"):
        call(pair, limit)


@pytest.mark.parametrize("norm_type", [0, -1, -2.5, math.nan, "fro", "x", None], ids=repr)
def test_unknown_orders(norm_type, pair):
    with pytest.raises(ValueError, match="norm_type must be a number > 0"):
        clip_grad_norm_(pair, 1.0, norm_type)
    with pytest.raises(ValueError, match="norm_type must be a number > 0"):
        get_total_norm([p.grad for p in pair], norm_type)


@pytest.mark.after_error
@every_call
def test_gradients_instead_of_parameters(call):
    grads = [torch.tensor([3.0]), torch.tensor([4.0])]
    with pytest.raises(ValueError, match=r"parameters\[0\] .* looks like a gradient"):
        call(grads)
    with pytest.raises(ValueError, match="looks like a gradient"):
        call(grads[0])
    assert [g.item() for g in grads] == [3.0, 4.0]


@every_call
def test_copies_of_weights_in_the_groups_of_an_optimizer(call):
    copies = [{"params": [torch.zeros(2)]}, {"params": [torch.zeros(2), torch.zeros(2)]}]
    with pytest.raises(ValueError, match=r"parameters\[0\]\['params'\]\[0\] .* copy of a weight .*clip_at_step"):
        call(copies)


@every_call
@pytest.mark.parametrize(
    ("passed", "named"),
    [
        (torch.nn.Linear(2, 2), "Linear"),
        ([("weight", 3), ("bias", 4)], "weight is of type int"),
        ({"weight": 3}, "weight is of type int"),
        (3, "int"),
        ([None], r"parameters\[0\] is of type NoneType"),
    ],
    ids=["module", "names", "dict", "number", "none"],
)
def test_things_without_a_gradient(call, passed, named):
    with pytest.raises(TypeError, match=named):
        call(passed)


@every_call
def test_something_without_a_gradient_among_parameters(call, pair):
    with pytest.raises(TypeError, match=r"parameters\[2\] is of type object"):
        call([*pair, object()])


@pytest.mark.after_error
@every_call
def test_integer_gradients(call, pair):
    # The parameter has none of its own dtype, so its gradient is put in an object that stands for one.
    integer = torch.zeros(2, dtype=torch.int64)
    integer.grad = torch.tensor([3, 4])
    with pytest.raises(TypeError, match=r"parameters\[2\]\.grad has dtype int64"):
        call([*pair, integer])
    assert integer.grad.tolist() == [3, 4]


@pytest.mark.after_error
def test_complex_gradients_have_no_order(pair):
    third = parameter([3 + 4j], torch.complex64)
    with pytest.raises(TypeError, match=r"parameters\[2\]\.grad is complex and cannot be clipped by value"):
        clip_grad_value_([*pair, third], 1.0)
    assert third.grad.tolist() == [3 + 4j]


def test_exhausted_generator_warns_once_as_torch_does():
    model = torch.nn.Linear(2, 2)
    parameters = model.parameters()
    assert len(list(parameters)) == 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        norm = clip_grad_norm_(parameters, 1.0)
    assert norm.item() == 0.0
    assert [str(w.message) for w in caught] == ["`parameters` is an empty generator, no gradient clipping will occur."]
    assert caught[0].category is UserWarning
    assert caught[0].filename == __file__


@pytest.mark.parametrize("call", [CALLS["value"], CALLS["with_norm"]], ids=["value", "with_norm"])
def test_exhausted_generator_elsewhere_is_an_error(call):
    with pytest.raises(ValueError, match="a generator that yields nothing: it was used up by an earlier loop"):
        call(p for p in ())


@pytest.mark.after_error
@pytest.mark.parametrize(("bad", "found"), [(math.nan, "1 NaN, 0 infinite"), (-math.inf, "0 NaN, 1 infinite")])
def test_error_if_nonfinite_names_the_gradients(bad, found, pair):
    third = parameter([1.0, bad])
    with pytest.raises(RuntimeError, match=r"The total norm of order 2.0 for gradients") as raised:
        clip_grad_norm_([*pair, third], 1.0, error_if_nonfinite=True)
    assert f"parameters[2].grad: {found}" in str(raised.value)
    assert "nonfinite=" not in str(raised.value)  # which is not an argument of PyTorch's function
    assert str(third.grad.tolist()) == str([1.0, bad])


@pytest.mark.parametrize("norm_type", [1, 2.0, "inf", math.inf], ids=repr)
def test_error_if_nonfinite_names_the_order(norm_type):
    order = float(norm_type)
    with pytest.raises(RuntimeError, match=f"The total norm of order {order} for gradients"):
        clip_grad_norm_(parameter([math.inf]), 1.0, norm_type, error_if_nonfinite=True)
    with pytest.raises(RuntimeError, match=f"The total norm of order {order} for gradients"):
        get_total_norm([torch.tensor([math.inf])], norm_type, error_if_nonfinite=True)


def test_error_if_nonfinite_is_silent_on_finite_gradients():
    one = parameter([3.0, 4.0])
    assert clip_grad_norm_(one, 5.0, error_if_nonfinite=True).item() == 5.0
    assert get_total_norm([one.grad], error_if_nonfinite=True).item() == 5.0


@pytest.mark.parametrize("tensors", [None, 3.0, torch.nn.Linear(2, 1), {"w": torch.ones(2)}])
def test_total_norms_are_those_of_tensors(tensors):
    with pytest.raises(TypeError, match=r"must be a tensor or an iterable of tensors, got .* Pass the gradients"):
        named_as_torch.get_total_norm(tensors)
