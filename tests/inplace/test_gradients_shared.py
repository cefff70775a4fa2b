"""Backward passes that leave gradients in one memory, wholly or in part: each counts, the memory is scaled once."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gradclip
from frameworks import ALL, by_name
from gradclip._src.inplace.norm import clip_grads_with_norm_
from gradclip.integrations import torch as drop_in
from rational import at_most

# Backward passes


def parameters(*shapes):
    return [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]


def two_biases():
    scale, first, second = parameters((3, 1, 1), (3,), (3,))
    out = torch.randn(4, 3, 5, 5) * scale * (first.view(1, -1, 1, 1) + second.view(1, -1, 1, 1))
    return [scale, first, second], out


def film():
    gamma, beta, shift = parameters((3,), (3,), (3,))
    out = torch.randn(4, 3, 5, 5) * (1 + gamma.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)) + beta.view(1, -1, 1, 1)
    return [gamma, beta, shift], out


def additive_gate():
    row, column, weight = parameters((1, 6), (6, 1), (6, 2))
    return [row, weight, column], (torch.randn(8, 6) * torch.sigmoid(row.view(6) + column.view(6))) @ weight


def class_token():
    token, positions, weight = parameters((4,), (6, 4), (4, 4))
    tokens = torch.cat([token.view(1, 1, 4), torch.randn(1, 5, 4)], 1) + positions.unsqueeze(0)
    return [token, weight, positions], tokens @ weight


def soft_prompt():
    prompt, positions, weight = parameters((3, 4), (8, 4), (4, 4))
    tokens = torch.cat([prompt.unsqueeze(0), torch.randn(1, 5, 4)], 1) + positions.unsqueeze(0)
    return [positions, prompt, weight], tokens @ weight


PASSES = (two_biases, film, additive_gate, class_token, soft_prompt)
every_pass = pytest.mark.parametrize("forward", PASSES, ids=lambda forward: forward.__name__)
on_both = pytest.mark.parametrize("framework", [f for f in ALL if f.name in ("torch", "torch-device")], ids=by_name)


def trained(forward, seed=0):
    """Return parameters after a backward pass that left two of their gradients in one memory."""
    torch.manual_seed(seed)
    params, out = forward()
    out.square().sum().backward()
    assert len({p.grad.untyped_storage().data_ptr() for p in params}) == len(params) - 1
    return params


def apart(params):
    """Return parameters with the same gradients, each in memory of its own."""
    clones = [torch.nn.Parameter(p.detach().clone()) for p in params]
    for clone, p in zip(clones, params, strict=True):
        clone.grad = p.grad.clone()
    return clones


def values(params):
    return [p.grad.double().numpy() for p in params]


def same(params, others, rtol=1e-6):
    for p, other in zip(params, others, strict=True):
        torch.testing.assert_close(p.grad, other.grad, rtol=rtol, atol=0)


@on_both
@every_pass
@pytest.mark.parametrize("clip", [gradclip.clip_grad_norm_, drop_in.clip_grad_norm_], ids=["gradclip", "drop-in"])
def test_the_norm_is_that_of_all_parameters_and_the_bound_holds(framework, forward, clip):
    for seed in range(5):
        params = trained(forward, seed)
        clones = apart(params)
        wanted = torch.nn.utils.clip_grad_norm_(clones, 0.7)
        with framework.mode():
            torch.testing.assert_close(gradclip.grad_norm(params), wanted, rtol=1e-6, atol=0)
            torch.testing.assert_close(clip(params, 0.7), wanted, rtol=1e-6, atol=0)
        same(params, clones, rtol=2e-6)
        assert at_most(values(params), 2, 0.7)
        assert not at_most(values(params), 2, 0.7 * (1 - 1e-5))
        assert len({p.grad.untyped_storage().data_ptr() for p in params}) == len(params) - 1


CALLS = {
    "ord 1": lambda ps: gradclip.clip_grad_norm_(ps, 0.7, 1),
    "largest": lambda ps: gradclip.clip_grad_norm_(ps, 0.01, math.inf),
    "with norm": lambda ps: clip_grads_with_norm_(ps, 1.0, 8.0),
    "value": lambda ps: gradclip.clip_grad_value_(ps, 0.5),
    "drop": lambda ps: gradclip.clip_grad_norm_(ps, 0.7, nonfinite="drop"),
    "raise": lambda ps: gradclip.clip_grad_norm_(ps, 0.7, nonfinite="raise"),
    "zero": lambda ps: gradclip.clip_grad_norm_(ps, 0.7, nonfinite="zero"),
    "large": lambda ps: gradclip.clip_grad_norm_(ps, 1e9),
    "layers": lambda ps: gradclip.clip_grad_layer_norm_(ps, [0.1, 0.3, 0.2]),
    "layers, skip": lambda ps: gradclip.clip_grad_layer_norm_(ps, 0.3, nonfinite="drop"),
    "units": lambda ps: gradclip.clip_grad_unit_norm_(ps, [0.1, 0.3, 0.2]),
    "adaptive": lambda ps: gradclip.adaptive_grad_clip_(ps, 0.01),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@on_both
@every_pass
@every_call
def test_each_call_does_what_it_does_to_gradients_apart(framework, forward, call):
    params = trained(forward)
    clones = apart(params)
    with framework.mode():
        found, wanted = call(params), call(clones)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    same(params, clones)


@on_both
@pytest.mark.parametrize("policy", ["propagate", "drop", "zero"])
def test_what_is_not_finite_follows_the_policy(framework, policy):
    params = trained(class_token)
    params[-1].grad[0, 1], params[-1].grad[3, 2] = math.nan, math.inf
    clones = apart(params)
    assert params[0].grad[1].isnan()
    for call in (gradclip.clip_grad_norm_, gradclip.clip_grad_layer_norm_):
        with framework.mode():
            call(params, 0.4, nonfinite=policy), call(clones, 0.4, nonfinite=policy)
        for p, clone in zip(params, clones, strict=True):
            torch.testing.assert_close(p.grad, clone.grad, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.after_error
@on_both
def test_an_error_leaves_the_gradients_as_they_are(framework):
    params = trained(soft_prompt)
    params[0].grad[7, 1] = math.nan
    before = [(p.grad, p.grad.clone()) for p in params]
    for call in (gradclip.clip_grad_norm_, gradclip.clip_grad_layer_norm_, gradclip.clip_grad_unit_norm_):
        with framework.mode(), pytest.raises(FloatingPointError, match=r"parameters\[0\]\.grad: 1 NaN"):
            call(params, 0.4, nonfinite="raise")
    for p, (grad, kept) in zip(params, before, strict=True):
        assert p.grad is grad
        torch.testing.assert_close(grad, kept, rtol=0, atol=0, equal_nan=True)


def test_nothing_is_written_where_nothing_is_clipped():
    params = trained(class_token)
    versions = [p.grad._version for p in params]
    gradclip.clip_grad_norm_(params, 1e9)
    assert [p.grad._version for p in params] == versions


@every_pass
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW], ids=lambda kind: kind.__name__)
def test_a_folded_step_divides_each_gradient_once(forward, kind):
    params = trained(forward)
    clones = apart(params)
    optimizer = kind(params, lr=0.1, fused=True)
    clipping = gradclip.clip_at_step(optimizer, 0.7, fused=True)
    optimizer.step()
    norm = torch.nn.utils.clip_grad_norm_(clones, 0.7)
    kind(clones, lr=0.1, fused=True).step()
    torch.testing.assert_close(clipping.norm, norm, rtol=1e-6, atol=0)
    same(params, clones, rtol=2e-6)
    for p, clone in zip(params, clones, strict=True):
        torch.testing.assert_close(p, clone, rtol=1e-6, atol=1e-7)


def test_a_monitor_sees_every_layer():
    params = trained(two_biases)
    monitor = gradclip.Monitor(layers_every=1)
    lengths = [float(p.grad.norm()) for p in params]
    norm = gradclip.clip_grad_norm_(params, 0.7, monitor=monitor)
    assert monitor.last.layers.norms.tolist() == pytest.approx(lengths, rel=1e-6)
    assert float(norm) == pytest.approx(math.hypot(*lengths), rel=1e-6)


# Compiled code


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", ["ord 1", "layers, skip", "units"])
def test_compiled_code_does_the_same(call):
    """Its operations run one after the other, so that memory that is scaled twice shows."""
    torch.compiler.reset()
    compiled = torch.compile(CALLS[call], backend="eager", fullgraph=True)
    params = trained(class_token)
    clones = apart(params)
    torch.testing.assert_close(compiled(params), CALLS[call](clones), rtol=1e-5, atol=0)
    same(params, clones, rtol=1e-5)


def test_what_has_no_values_is_told_apart_by_its_storage():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        buffer = torch.empty(8, device="cuda")
        params = [torch.nn.Parameter(torch.empty(size, device="cuda")) for size in (4, 4, 6)]
        for p, grad in zip(params, (buffer.narrow(0, *at) for at in ((0, 4), (4, 4), (2, 6))), strict=True):
            p.grad = grad
        gradclip.clip_grad_layer_norm_(params[:2], 1.0)
        assert len({p.grad.untyped_storage()._cdata for p in params}) == 1
        gradclip.clip_grad_norm_(params, 1.0)
        assert len({p.grad.untyped_storage()._cdata for p in params}) == 1
        gradclip.clip_grad_layer_norm_(params, 1.0)
        assert len({p.grad.untyped_storage()._cdata for p in params}) == 3


def test_a_gradient_that_meets_itself_gets_memory_for_each_element():
    base = torch.arange(1.0, 7.0)
    windows, whole = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((4, 3), (6,)))
    windows.grad, whole.grad = base.unfold(0, 3, 1), base
    units = [*windows.grad.clone(), base.clone()]
    gradclip.clip_grad_unit_norm_([windows, whole], 3.0, unit_axis=0)
    for clipped, unit in zip([*windows.grad, whole.grad], units, strict=True):
        torch.testing.assert_close(clipped, unit * (3.0 / float(unit.double().norm())), rtol=1e-6, atol=0)
        assert gradclip.norm_at_most(clipped, 3.0)


@pytest.mark.parametrize("clip", [gradclip.clip_grad_layer_norm_, gradclip.clip_grad_unit_norm_])
def test_a_holder_that_accepts_no_copy_is_named_before_anything_is_written(clip):
    class Fixed:
        def __init__(self, grad):
            self._grad = grad

        @property
        def grad(self):
            return self._grad

    shared, other = np.array([3.0, 4.0]), np.array([30.0, 40.0])
    with pytest.raises(TypeError, match=r"parameters\[2\].grad .* a Fixed, does not accept"):
        clip([SimpleNamespace(grad=other), SimpleNamespace(grad=shared), Fixed(shared)], 1.0)
    assert (shared.tolist(), other.tolist()) == ([3.0, 4.0], [30.0, 40.0])
    gradclip.clip_grad_norm_([SimpleNamespace(grad=shared), Fixed(shared)], 1.0)  # written back, not replaced
