"""Calls on a GPU's tensors take three launches, and give what the same calls give on the host."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import gradclip
from interpreted import SILENT, interpreted
from rational import at_most

pytestmark = pytest.mark.filterwarnings(SILENT)
THREE, TWO = ["sums", "decide", "scale"], ["sums", "decide"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(30, 7), (500,), (5001,), (), (16,), (0,), (3, 4, 5, 6)]
POLICIES = ("propagate", "drop", "zero")


@pytest.fixture
def launched():
    with interpreted() as found:
        yield found


def parameters(seed=0, dtypes=DTYPES, wrong=()):
    rng, made = np.random.default_rng(seed), []
    for index, shape in enumerate(SHAPES):
        grad = torch.tensor(rng.normal(size=shape)).to(dtypes[index % len(dtypes)])
        made.append(torch.nn.Parameter(torch.zeros_like(grad)))
        made[-1].grad = grad
    for index, value in wrong:
        made[index].grad.view(-1)[3] = value
    return made


def large_parameters():
    """Return parameters that take two programs of a kernel each, one of each dtype."""
    made = []
    for dtype in DTYPES:
        made.append(torch.nn.Parameter(torch.zeros(70_001, dtype=dtype)))
        made[-1].grad = torch.linspace(-1.0, 1.0, 70_001).to(dtype)
    return made


def grads(params):
    return [one.grad for one in params]


def values(params):
    return [one.grad.double().numpy() for one in params]


def same(one, other):
    pairs = list(zip(one, other, strict=True))
    assert all(x.dtype == y.dtype and torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in pairs)


def by_groups(params, max_norms=(1.0, 2.0)):
    return [{"params": params[:2], "max_norm": max_norms[0]}, {"params": params[2:], "max_norm": max_norms[1]}]


IN_PLACE = {
    "one norm": lambda params, **options: gradclip.clip_grad_norm_(params, 1.0, **options),
    "order 1": lambda params, **options: gradclip.clip_grad_norm_(params, 1.0, 1, **options),
    "order inf": lambda params, **options: gradclip.clip_grad_norm_(params, 0.25, "inf", **options),
    "not clipped": lambda params, **options: gradclip.clip_grad_norm_(params, 1e6, **options),
    "a tensor": lambda params, **options: gradclip.clip_grad_norm_(params, torch.tensor(0.5), **options),
    "by layer": lambda params, **options: gradclip.clip_grad_layer_norm_(params, 0.5, **options),
    "a list": lambda params, **options: gradclip.clip_grad_layer_norm_(params, [0.5, 1, 9e9, 2, 3, 4, 5], **options),
    "groups": lambda params, **options: gradclip.clip_grad_norm_(by_groups(params), 9.0, **options),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("wrong", [(), ((1, math.nan), (2, math.inf))], ids=["finite", "not finite"])
@pytest.mark.parametrize("call", IN_PLACE)
def test_in_place_calls_do_what_they_do_on_the_host(call, wrong, policy):
    here, there = parameters(wrong=wrong), parameters(wrong=wrong)
    wanted = IN_PLACE[call](here, nonfinite=policy)
    with interpreted() as found:
        norms = IN_PLACE[call](there, nonfinite=policy)
    assert found.names == THREE
    same(grads(there), grads(here))
    some = (norms, wanted) if isinstance(norms, list) else ([norms], [wanted])
    assert [norm.dtype for norm in some[0]] == [torch.float32] * len(some[0])
    np.testing.assert_allclose(*some, rtol=1e-6)


def test_large_tensors_are_clipped_as_on_the_host():
    here, there = large_parameters(), large_parameters()
    wanted = gradclip.clip_grad_norm_(here, 1.0)
    with interpreted() as found:
        norm = gradclip.clip_grad_norm_(there, 1.0)
    assert found.names == THREE
    same(grads(there), grads(here))
    assert float(norm) == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.parametrize("ord", [1, 2, math.inf])
@pytest.mark.parametrize("share", [1e-40, 1e-3, 0.999, 1.001])
def test_the_bound(launched, ord, share):
    params = parameters(1)
    max_norm = share * float(gradclip.grad_norm(params, ord))
    gradclip.clip_grad_norm_(params, max_norm, ord)
    assert at_most(values(params), ord, max_norm)
    assert launched.names == TWO + THREE


def test_the_objects_stay_and_their_versions_rise(launched):
    params = parameters()
    before = grads(params)
    versions = [grad._version for grad in before]
    gradclip.clip_grad_norm_(params, 1.0)
    assert all(x is y for x, y in zip(before, grads(params), strict=True))
    assert [grad._version for grad in before] == [version + 1 for version in versions]


def test_frozen_parameters_have_no_norm(launched):
    params = parameters()
    params[1].grad = None
    norms = gradclip.clip_grad_layer_norm_(params, 0.5)
    assert norms[1] is None
    assert [norm is None for norm in norms].count(True) == 1
    assert launched.names == THREE


def test_a_parameter_that_is_listed_twice_counts_once(launched):
    params = parameters()
    wanted = float(gradclip.grad_norm(params))
    assert float(gradclip.clip_grad_norm_([*params, params[2]], 0.5)) == pytest.approx(wanted, rel=1e-6)
    assert at_most(values(params), 2, 0.5)


def test_functional_calls_leave_their_input(launched):
    tree = grads(parameters())
    before = [x.clone() for x in tree]
    clipped, norm = gradclip.clip_by_global_norm(tree, 0.5)
    kept, _ = gradclip.clip_by_global_norm(tree, 1e9)
    assert launched.names == THREE + THREE
    same(tree, before)
    same(kept, before)
    assert not {x.data_ptr() for x in clipped if x.numel()} & {x.data_ptr() for x in tree}
    assert at_most([x.double().numpy() for x in clipped], 2, 0.5)
    assert norm == gradclip.global_norm(tree)


@pytest.mark.parametrize("layout", ["channels_last", "transposed"])
def test_results_lie_as_their_input(launched, layout):
    x = torch.randn(3, 5).T if layout == "transposed" else torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    (clipped,), _ = gradclip.clip_by_global_norm([x], 0.5)
    assert clipped.stride() == x.stride()
    wanted, _ = gradclip.clip_by_global_norm(x.numpy(), 0.5)
    np.testing.assert_array_equal(clipped.numpy(), wanted)


def test_where_a_derivative_is_asked_for_it_is_taken(launched):
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    clipped, _ = gradclip.clip_by_global_norm([x], 1.0)
    clipped[0].sum().backward()
    assert x.grad.tolist() == pytest.approx([0.032, -0.024])


@pytest.mark.parametrize("layers_every", [0, 1])
def test_a_monitor_sees_what_it_sees_on_the_host(layers_every):
    def run():
        monitor, params = gradclip.Monitor(layers_every=layers_every), parameters()
        for max_norm in (1e6, 100.0, 1.0):
            gradclip.clip_grad_norm_(params, max_norm, monitor=monitor)
        return monitor, params

    wanted, here = run()
    with interpreted() as found:
        monitor, there = run()
        seen = [(one.norm, one.coefficient) for one in monitor.records]
        tops = monitor.top_layers
    assert found.names == ["sums", "decide", "decide", "scale"] * 3
    np.testing.assert_allclose(seen, [(one.norm, one.coefficient) for one in wanted.records], rtol=1e-6)
    assert tops == pytest.approx(wanted.top_layers, rel=1e-6)
    same(grads(there), grads(here))


@pytest.mark.parametrize("skip_above", [math.inf, 2.0])
def test_an_adaptive_threshold_does_what_it_does_on_the_host(skip_above):
    def run():
        max_norm, params = gradclip.AdaptiveThreshold(skip_above=skip_above), parameters()
        for factor in (1.0, 1.5, 20.0, 1.0):
            for one in params:
                one.grad *= factor
            gradclip.clip_grad_norm_(params, max_norm)
        return (max_norm.steps, max_norm.num_clipped, max_norm.num_skipped, float(max_norm.next_max_norm)), params

    wanted, here = run()
    with interpreted() as found:
        seen, there = run()
    assert set(found.names) == set(THREE)
    assert seen == pytest.approx(wanted, rel=1e-6)
    np.testing.assert_allclose(
        [float(x.double().norm()) for x in grads(there)], [float(x.double().norm()) for x in grads(here)], rtol=1e-2
    )


# PyTorch's own rules for forward derivatives are scripted.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_derivatives_and_transforms_of_a_threshold_are_taken(launched):
    x = torch.tensor([3.0, 4.0])

    def clip(max_norm):
        return gradclip.clip_by_global_norm([x], max_norm)[0][0]

    one, both = torch.tensor(1.0), torch.tensor([1.0, 2.0])
    assert torch.vmap(clip)(both).flatten().tolist() == pytest.approx([0.6, 0.8, 1.2, 1.6])
    assert torch.func.jvp(clip, (one,), (one,))[1].tolist() == pytest.approx([0.6, 0.8])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.tensor([1.0, 0.0]))
        clipped, _ = gradclip.clip_by_global_norm([dual], 1.0)
        assert forward_ad.unpack_dual(clipped[0]).tangent.tolist() == pytest.approx([0.128, -0.096])


def test_a_threshold_without_memory_of_its_own_is_read_by_its_value(launched):
    x = torch.tensor([3.0, 4.0])
    negated = torch.tensor(0 - 1j, dtype=torch.complex128).conj().imag
    for max_norm, wanted in ((negated, [0.6, 0.8]), (torch._efficientzerotensor((), dtype=torch.float64), [0.0, 0.0])):
        assert gradclip.clip_by_global_norm([x], max_norm)[0][0].tolist() == pytest.approx(wanted)


def test_under_fake_tensors_nothing_is_launched(launched):
    params = parameters()
    with FakeTensorMode(allow_non_fake_inputs=True):
        gradclip.clip_grad_norm_(params, 1.0)
        gradclip.clip_grad_norm_(named(params), 1.0)
    assert launched.names == []


def test_a_tracer_is_refused(launched):
    warnings.simplefilter("ignore")  # that it is deprecated
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace"):
        torch.jit.trace(lambda x: gradclip.clip_by_global_norm([x], 1.0)[0][0], torch.ones(2), check_trace=False)


def test_an_empty_parameter_that_is_listed_twice_has_one_norm(launched):
    monitor, params = gradclip.Monitor(layers_every=1), parameters()
    for _ in range(2):
        gradclip.clip_grad_norm_([*params, params[5]], 1.0, monitor=monitor)
    assert next(iter(monitor.top_layers)) == "parameters.2"
    with pytest.raises(ValueError, match="occurs twice"):
        gradclip.clip_grad_layer_norm_([params[5], params[5], params[0]], [1.0, 2.0, 3.0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_spellings_are_as_tight(launched, dtype):
    for seed in range(40):
        params = parameters(seed, (dtype,))[3:5]
        gradclip.clip_grad_norm_(named(params), 0.25)
        assert not at_most(values(params), 2, 0.25 * (1 - 1e-5 if dtype is torch.float32 else 0.99))


OTHERS = {
    "order 3": (lambda params: gradclip.clip_grad_norm_(params, 0.5, 3), 3),
    "shared memory": (lambda params: gradclip.clip_grad_norm_(sharing(params), 0.5), 2),
    "other objects": (lambda params: gradclip.clip_grad_norm_([Holder(one) for one in params], 0.5), 2),
    "chosen": (lambda params: gradclip.clip_grad_norm_(named(params), 0.5, where="*"), 2),
}


def named(params):
    return [(f"layer{number}.weight", one) for number, one in enumerate(params)]


class Holder:
    def __init__(self, parameter):
        self.grad = parameter.grad


def sharing(params):
    params[4].grad = params[1].grad[:16].view(16)
    return params


@pytest.mark.parametrize("call", OTHERS)
def test_other_calls_share_the_kernels_or_go_without(launched, call):
    clip, ord = OTHERS[call]
    params = parameters(2)
    clip(params)
    assert at_most([x for i, x in enumerate(values(params)) if call != "shared memory" or i != 4], ord, 0.5)


def test_beside_float64_only_norms_are_measured(launched):
    params = parameters(3, (*DTYPES, torch.float64))
    norm = gradclip.clip_grad_norm_(params, 0.5)
    assert norm.dtype is torch.float64
    assert launched.names == TWO
    assert at_most(values(params), 2, 0.5)


BAD = {
    "negative": (lambda params: gradclip.clip_grad_norm_(params, -1.0), ValueError, "must not be negative"),
    "none": (lambda params: gradclip.clip_grad_layer_norm_(params, None), TypeError, "max_norm must be"),
    "order": (lambda params: gradclip.clip_grad_norm_(params, 1.0, 0.5), ValueError, "ord must be"),
    "policy": (lambda params: gradclip.clip_grad_layer_norm_(params, 1.0, nonfinite="no"), ValueError, "nonfinite"),
    "lengths": (lambda params: gradclip.clip_grad_layer_norm_(params, [1.0]), ValueError, "a list of 1"),
    "names": (lambda params: gradclip.clip_grad_norm_(params, 1.0, nonfinite="raise"), FloatingPointError, "1 NaN"),
}


@pytest.mark.parametrize("call", BAD)
@pytest.mark.after_error
def test_after_an_error_nothing_has_changed(launched, call):
    clip, error, text = BAD[call]
    params = parameters(wrong=[(2, math.nan)])
    before = [x.clone() for x in grads(params)]
    with pytest.raises(error, match=text):
        clip(params)
    same(grads(params), before)
