"""The names of `torch.nn.utils`: signatures, values worked out by hand, and what is written where."""

import math
from contextlib import nullcontext

import pytest
import torch

from gradclip.integrations.torch import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from parity_support import REQUIRED, arguments, assert_just_below

# 3/5 and 4/5 in the half types rounded toward zero, in float32 times 1 - 2**-23 and rounded to nearest twice.
CLIPPED = {
    torch.float16: [1228 / 2048, 1638 / 2048],
    torch.bfloat16: [153 / 256, 204 / 256],
    torch.float32: [10066328 / 2**24, 13421771 / 2**24],
}


def parameter(values, dtype=torch.float32):
    made = torch.nn.Parameter(torch.zeros_like(torch.as_tensor(values, dtype=dtype)))
    made.grad = torch.as_tensor(values, dtype=dtype)
    return made


def three_four():
    return [parameter([3.0]), parameter([[4.0]])]


def test_signatures():
    shared = [("error_if_nonfinite", False), ("foreach", None)]
    assert arguments(clip_grad_norm_) == [("parameters", REQUIRED), ("max_norm", REQUIRED), ("norm_type", 2.0), *shared]
    assert arguments(get_total_norm) == [("tensors", REQUIRED), ("norm_type", 2.0), *shared]
    assert arguments(clip_grad_value_) == [("parameters", REQUIRED), ("clip_value", REQUIRED), ("foreach", None)]
    assert arguments(clip_grads_with_norm_) == [
        ("parameters", REQUIRED),
        ("max_norm", REQUIRED),
        ("total_norm", REQUIRED),
        ("foreach", None),
    ]


@pytest.mark.parametrize("dtype", CLIPPED, ids=str)
def test_clips_each_dtype(dtype):
    one = parameter([3.0, 4.0], dtype)
    norm = clip_grad_norm_([one], 1.0)
    assert one.grad.tolist() == CLIPPED[dtype]
    assert one.grad.dtype is dtype
    assert (norm.dtype, norm.shape, norm.item(), norm.requires_grad) == (torch.float32, (), 5.0, False)


def test_clips_float64():
    one = parameter([3.0, 4.0], torch.float64)
    norm = clip_grad_norm_([one], 1.0)
    assert_just_below(one.grad, [0.6, 0.8], "float64")
    assert (norm.dtype, norm.item()) == (torch.float64, 5.0)


def test_clips_complex_by_magnitude():
    one = parameter([3 + 4j], torch.complex64)
    norm = clip_grad_norm_([one], 1.0)
    assert torch.view_as_real(one.grad)[0].tolist() == CLIPPED[torch.float32]
    assert (norm.dtype, norm.item()) == (torch.float32, 5.0)


def test_mixed_dtypes_share_one_norm_and_keep_their_own():
    half, double = parameter([3.0], torch.float16), parameter([4.0], torch.float64)
    norm = clip_grad_norm_([half, double], 1.0)
    assert half.grad.tolist() == CLIPPED[torch.float16][:1]
    assert_just_below(double.grad, [0.8], "float64")
    assert (half.grad.dtype, double.grad.dtype, norm.dtype) == (torch.float16, torch.float64, torch.float64)


@pytest.mark.parametrize(
    ("norm_type", "norm"),
    [(1, 7.0), (2, 5.0), ("2", 5.0), (math.inf, 4.0), ("inf", 4.0), (-math.inf, 3.0), ("-inf", 3.0)],
)
def test_orders(norm_type, norm):
    ps = three_four()
    assert clip_grad_norm_(ps, norm / 2, norm_type).item() == norm
    assert_just_below([p.grad.item() for p in ps], [1.5, 2.0], "float32")


def test_order_below_one():
    one = parameter([1.0, 4.0, 9.0])
    assert clip_grad_norm_(one, 18.0, 0.5).item() == 36.0
    assert_just_below(one.grad, [0.5, 2.0, 4.5], "float32")


@pytest.mark.parametrize("max_norm", [5, 5.0, math.inf, torch.tensor(5.0)], ids=repr)
def test_writes_nothing_where_nothing_is_clipped(max_norm):
    one = parameter([3.0, 4.0])
    grad, version = one.grad, one.grad._version
    assert clip_grad_norm_(one, max_norm).item() == 5.0
    assert one.grad is grad
    assert grad._version == version
    assert grad.tolist() == [3.0, 4.0]


def test_writes_where_the_gradient_lies_and_says_so_to_autograd():
    one = parameter([3.0, 4.0])
    grad, version = one.grad, one.grad._version
    clip_grad_norm_(one, 1.0)
    assert one.grad is grad
    assert grad._version == version + 1
    assert grad.tolist() == CLIPPED[torch.float32]


@pytest.mark.parametrize("foreach", [None, True, False])
def test_foreach_changes_nothing(foreach):
    ps = three_four()
    norm = clip_grad_norm_(ps, 1.0, foreach=foreach)
    assert norm.item() == 5.0
    assert [p.grad.item() for p in ps] == CLIPPED[torch.float32]


def test_max_norm_zero_gives_zeros():
    one = parameter([3.0, -4.0])
    clip_grad_norm_(one, 0.0)
    assert one.grad.tolist() == [0.0, 0.0]


def test_skips_parameters_without_gradient():
    ps = [torch.nn.Parameter(torch.zeros(2)), *three_four()]
    assert clip_grad_norm_(ps, 1.0).item() == 5.0
    assert ps[0].grad is None
    assert [p.grad.item() for p in ps[1:]] == CLIPPED[torch.float32]


@pytest.mark.parametrize("ps", [[], (), [torch.nn.Parameter(torch.zeros(2))]], ids=["list", "tuple", "none"])
def test_norm_of_nothing_is_zero(ps):
    with pytest.warns(UserWarning, match="no parameter has a gradient") if ps else nullcontext():
        norm = clip_grad_norm_(ps, 1.0)
    assert isinstance(norm, torch.Tensor)
    assert (norm.item(), norm.dtype, norm.shape) == (0.0, torch.float32, ())


def test_takes_a_generator():
    ps = three_four()
    assert clip_grad_norm_((p for p in ps), 1.0).item() == 5.0
    assert [p.grad.item() for p in ps] == CLIPPED[torch.float32]


def test_tied_parameters_count_once_and_a_shared_gradient_for_each():
    one, other = parameter([3.0, 4.0]), parameter([0.0, 0.0])
    other.grad = one.grad
    assert clip_grad_norm_([one, other, one], 1.0).item() == pytest.approx(50**0.5, rel=1e-6)
    assert other.grad is one.grad
    assert one.grad.tolist() == pytest.approx([3 / 50**0.5, 4 / 50**0.5], rel=1e-6)


def test_coalesced_sparse_gradient_is_clipped_where_it_lies():
    one = torch.nn.Parameter(torch.zeros(4))
    one.grad = grad = torch.sparse_coo_tensor([[0, 2]], [3.0, 4.0], (4,), check_invariants=True).coalesce()
    assert clip_grad_norm_(one, 1.0).item() == 5.0
    assert one.grad is grad
    three, four = CLIPPED[torch.float32]
    assert one.grad.to_dense().tolist() == [three, 0.0, four, 0.0]


def test_sparse_gradient_counts_what_lies_at_one_position_as_one_element():
    one = torch.nn.Parameter(torch.zeros(4))
    one.grad = torch.sparse_coo_tensor([[0, 2, 0]], [1.0, 4.0, 2.0], (4,), check_invariants=True)
    assert clip_grad_norm_(one, 1.0).item() == 5.0
    three, four = CLIPPED[torch.float32]
    assert one.grad.to_dense().tolist() == [three, 0.0, four, 0.0]


def test_slice_of_a_larger_tensor_leaves_its_surroundings():
    base = torch.full((3, 4), 2.0)
    one = torch.nn.Parameter(torch.zeros(2, 2))
    one.grad = base[:2, 1:3].t()
    assert clip_grad_norm_(one, 2.0).item() == 4.0
    inside = 1.0 - 2.0**-23
    assert base.tolist() == [[2.0, inside, inside, 2.0]] * 2 + [[2.0] * 4]


def test_expanded_gradient_is_replaced():
    one = torch.nn.Parameter(torch.zeros(2, 2))
    one.grad = torch.tensor([1.0]).expand(2, 2)
    assert clip_grad_norm_(one, 1.0).item() == 2.0
    assert_just_below(one.grad, [[0.5, 0.5], [0.5, 0.5]], "float32")


@pytest.mark.parametrize("norm_type", [1, 2, math.inf])
def test_scalar_and_empty_gradients(norm_type):
    ps = [parameter(3.0), parameter([])]
    assert clip_grad_norm_(ps, 1.0, norm_type).item() == 3.0
    assert_just_below(ps[0].grad, 1.0, "float32")
    assert ps[1].grad.shape == (0,)


def test_gradient_that_has_a_graph_is_clipped_outside_of_it():
    one = torch.nn.Parameter(torch.zeros(2))
    one.grad = grad = torch.tensor([3.0, 4.0], requires_grad=True) * 1
    norm = clip_grad_norm_(one, 1.0)
    assert one.grad is grad
    assert not norm.requires_grad
    assert grad.tolist() == CLIPPED[torch.float32]


def test_finite_gradients_never_overflow():
    one = parameter([3 * 2.0**100, 4 * 2.0**100])
    assert clip_grad_norm_(one, 1.0).item() == 5 * 2.0**100
    assert_just_below(one.grad, [0.6, 0.8], "float32")
    two = parameter([3e38, 3e38])
    assert clip_grad_norm_(two, 1.0, error_if_nonfinite=True).item() == math.inf
    assert_just_below(two.grad, [math.sqrt(0.5)] * 2, "float32")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_gradients_are_seen_everywhere(bad):
    ps = [parameter([bad, 1.0]), parameter([2.0])]
    norm = clip_grad_norm_(ps, 1.0)
    assert math.isnan(norm) if math.isnan(bad) else norm == math.inf
    assert all(p.grad.isnan().all() for p in ps)


def test_clip_grad_value():
    ps = [parameter([3.0, -4.0, 0.5, math.nan, math.inf]), torch.nn.Parameter(torch.zeros(1))]
    grad = ps[0].grad
    assert clip_grad_value_(ps, 2.5) is None
    assert ps[0].grad is grad
    assert str(grad.tolist()) == "[2.5, -2.5, 0.5, nan, 2.5]"


def test_clip_grad_value_of_nothing():
    assert clip_grad_value_([], 1.0) is None
    with pytest.warns(UserWarning, match="no parameter has a gradient"):
        assert clip_grad_value_(torch.nn.Parameter(torch.zeros(1)), 1.0, foreach=True) is None


@pytest.mark.parametrize("one_tensor", [False, True])
def test_get_total_norm(one_tensor):
    tensors = torch.tensor([3.0, 4.0]) if one_tensor else [torch.tensor([3.0]), torch.tensor([[4.0]])]
    norm = get_total_norm(tensors)
    assert (norm.item(), norm.dtype, norm.shape) == (5.0, torch.float32, ())
    assert get_total_norm(iter([torch.tensor([-3.0, 4.0])]), 1).item() == 7.0
    assert get_total_norm([]).item() == 0.0
    assert not get_total_norm([torch.tensor([3.0, 4.0], requires_grad=True)]).requires_grad


@pytest.mark.parametrize("total_norm", [torch.tensor(5.0), torch.tensor(5.0, dtype=torch.float16), 5.0], ids=repr)
def test_clip_grads_with_norm(total_norm):
    ps = three_four()
    assert clip_grads_with_norm_(ps, 1.0, total_norm) is None
    assert_just_below([p.grad.item() for p in ps], [0.6, 0.8], "float32")
    ps = three_four()
    clip_grads_with_norm_((p for p in ps), 5.0, total_norm)
    assert [p.grad.item() for p in ps] == [3.0, 4.0]


@pytest.mark.parametrize("max_norm", [0.5, 10.0])
def test_clip_grads_with_a_norm_that_is_nan_makes_that_seen(max_norm):
    one = parameter([3.0, 4.0])
    clip_grads_with_norm_(one, max_norm, torch.tensor(math.nan))
    assert one.grad.isnan().all()


def test_total_norms_of_integers_are_refused_as_by_torch():
    for call in (get_total_norm, torch.nn.utils.get_total_norm):
        with pytest.raises((TypeError, RuntimeError), match=r"\[1\] has dtype int64|Got Long"):
            call([torch.ones(2), torch.tensor([3, 4])])
