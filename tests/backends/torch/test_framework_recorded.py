"""What records PyTorch's operations records the clip, and not what it came to for one input."""

import jax
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import gradclip

BATCH = torch.tensor([[3.0, 4.0], [0.3, 0.4], [6.0, -8.0]])
SMALL = BATCH / 100


def in_place(function):
    def call(gradient):
        parameter = torch.nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient * 1.0
        function([parameter], 1.0)
        return parameter.grad

    return call


FUNCTIONS = {
    "global_norm": lambda x: gradclip.global_norm([x]),
    "layer_norms": lambda x: gradclip.layer_norms([x])[0],
    "clip_by_global_norm": lambda x: gradclip.clip_by_global_norm({"x": x}, 1.0)[0]["x"],
    "clip_by_global_norm half": lambda x: gradclip.clip_by_global_norm(x.half(), 1.0, ord=3)[0],
    "clip_by_global_norm double": lambda x: gradclip.clip_by_global_norm(x.double(), 1.0, ord="inf")[0],
    "clip_by_layer_norm": lambda x: gradclip.clip_by_layer_norm([x], 1.0)[0][0],
    "clip_by_value": lambda x: gradclip.clip_by_value([x], 1.0)[0],
    "per_example_clip": lambda x: gradclip.per_example_clip([x], 1.0)[0][0],
    "per_example_clip grid": lambda x: gradclip.per_example_clip([x], 1.0, grid=1000)[0][0],
    "clip_grad_norm_": in_place(gradclip.clip_grad_norm_),
    "clip_grad_value_": in_place(gradclip.clip_grad_value_),
}
every_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


@every_function
@pytest.mark.parametrize("traced_with", [BATCH, SMALL], ids=["clipped", "unclipped"])
def test_make_fx_records_the_clip(function, traced_with):
    recorded = make_fx(function, tracing_mode="real")(traced_with)
    for x in (BATCH, SMALL, -3 * BATCH):
        assert torch.equal(recorded(x), function(x))


def test_make_fx_records_thresholds_and_derivatives():
    clip = lambda x, c: gradclip.clip_by_global_norm(x, c)[0].sum()
    gradient = torch.func.grad(clip, (0, 1))
    recorded = make_fx(gradient, tracing_mode="real")(BATCH, torch.tensor(1.0))
    for c in (0.5, 100.0):
        for got, want in zip(recorded(BATCH, torch.tensor(c)), gradient(BATCH, torch.tensor(c)), strict=True):
            assert torch.allclose(got, want)


def test_make_fx_cannot_look_for_what_is_not_finite():
    with pytest.raises(ValueError, match="nonfinite='raise'"):
        make_fx(lambda x: gradclip.clip_by_global_norm(x, 1.0, nonfinite="raise")[0])(BATCH)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@every_function
def test_jit_trace_is_an_error(function):
    with pytest.raises(RuntimeError, match=r"under torch\.jit\.trace.*torch\.compile"):
        torch.jit.trace(function, (BATCH,))


class _Asked(type):
    def __instancecheck__(cls, instance):
        return _refuse(type(instance))

    def __subclasscheck__(cls, kind):
        return _refuse(kind)


def _refuse(kind):
    assert not issubclass(kind, torch.Tensor), "JAX's type was asked about a tensor"
    return False


@every_function
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_jax_is_not_asked_about_tensors(function, compiled, monkeypatch):
    """Newer versions of PyTorch refuse to compile that."""
    monkeypatch.setattr("gradclip._src.backends.registry._KEY_BY_TYPE", {})
    monkeypatch.setattr(jax, "Array", _Asked("Array", (), {}))
    want = function(BATCH)
    torch.compiler.reset()
    call = torch.compile(function, backend="eager") if compiled else function
    # Compiled code multiplies by one number, rounding to nearest: the same within four units in the last place.
    found = call(BATCH)
    near = 4 * torch.finfo(want.dtype).eps if compiled and want.is_floating_point() else 0.0
    assert found.dtype == want.dtype
    assert torch.allclose(found, want, rtol=near, atol=0)


def test_examples_are_clipped_in_one_graph():
    call = torch.compile(lambda x: gradclip.per_example_clip(x, 1.0)[0], backend="eager", fullgraph=True)
    torch.testing.assert_close(call(torch.tensor([[3.0, 4.0], [0.0, 0.5]])), torch.tensor([0.6, 1.3]))
