"""Parameters report their operations; what does not come through them is noticed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradclip._src.private.ghost.records import Made
from gradclip._src.private.ghost.torch.taps import TorchTaps
from tapped_torch import distance, gradients_by_loop, remade, tapped_gradients, with_aux

DTYPE = torch.float64


def last(y):
    """A loss of any result in which each element counts differently."""
    weights = torch.arange(1, y.numel() + 1, dtype=y.dtype).reshape(y.shape)
    return (torch.sin(y) * weights).sum()


def checked(loss, params, *batch):
    """Return the uses and the result of a loss, after a look at the gradients."""
    uses, result, found = tapped_gradients(loss, params, *batch)
    assert distance(found, gradients_by_loop(loss, params, *batch)) < 1e-10
    return uses, result


def numbers(*shape):
    return torch.randn(shape, dtype=DTYPE, generator=torch.Generator().manual_seed(sum(shape)))


class Doubled(torch.autograd.Function):
    """y = 2 x W^T, with a derivative of its own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return 2 * F.linear(x, w)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, e):
        x, w = ctx.saved_tensors
        return 2 * e @ w, 2 * e.mT @ x


def test_derivatives_of_ones_own_are_made():
    uses, _ = checked(lambda p, x: last(Doubled.apply(x, p["w"])), {"w": numbers(4, 3)}, numbers(5, 2, 3))
    assert uses["w"].reason == "custom_function_call"


@pytest.mark.parametrize("both", [False, True])
def test_operations_that_do_not_report_themselves_are_noticed(both):
    def loss(p, x):
        hidden = torch.func.grad(lambda w: last(F.linear(x, w)))(p["w"])
        return last(hidden) + (last(F.linear(x, p["w"][:2])) if both else 0)

    params, x = {"w": numbers(4, 3)}, numbers(5, 2, 3)
    uses, result = checked(loss, params, x)
    assert uses["w"].reason == "an operation that does not report itself"
    _, result, found = tapped_gradients(loss, params, x, only=["w"])
    assert result.untapped == {0: uses["w"].reason}
    assert isinstance(result.gradients[0], Made)
    assert distance(found, gradients_by_loop(loss, params, x)) < 1e-10


def test_views_that_do_not_report_themselves_are_noticed():
    loss = lambda p, x: last(torch.func.grad(lambda w: last(F.linear(x, w)))(p["w"].t()[:2]))
    uses, _ = checked(loss, {"w": numbers(3, 4)}, numbers(5, 2, 3))
    assert uses["w"].reason == "an operation that does not report itself"


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("wrap", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.orthogonal])
def test_parametrized_modules(wrap):
    torch.manual_seed(0)
    layers = nn.Sequential(wrap(nn.Linear(3, 4)), nn.Linear(4, 2)).to(DTYPE)
    params = {name: x.detach() for name, x in layers.named_parameters()}
    loss = lambda p, x: last(torch.func.functional_call(layers, p, (x,)))
    uses, _ = checked(loss, params, numbers(5, 3))
    assert [name for name, use in uses.items() if not use.reason] == ["1.weight"]


def test_modules_with_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
            self.head.weight = self.table.weight

        def forward(self, tokens):
            return self.head(torch.tanh(self.table(tokens)))

    module = Tied().to(DTYPE)
    params = {name: x.detach() for name, x in module.named_parameters()}
    assert list(params) == ["table.weight"]
    loss = lambda p, t: last(torch.func.functional_call(module, p, (t,)))
    uses, _ = checked(loss, params, torch.tensor([[0, 2, 2], [6, 1, 0]]))
    assert [use.operation for use in uses["table.weight"].uses] == ["embedding", "linear"]


def test_both_names_of_one_tensor_get_their_own_gradient():
    w = numbers(3, 3)
    _, result = checked(lambda p, x: last(x @ p["a"]) + last(F.linear(x, p["b"])), {"a": w, "b": w}, numbers(4, 2, 3))
    assert [len(parts) for parts in result.gradients] == [1, 1]


def test_facts_about_a_parameter():
    seen = []

    def loss(p, x):
        w = p["w"]
        seen.append((w.shape, w.dtype, w.device.type, w.size(0), w.dim(), len(w), w.numel(), w.is_contiguous()))
        seen.append((isinstance(w, torch.Tensor), w.requires_grad, w.ndim, w.stride(), torch.is_floating_point(w)))
        assert "tensor" in repr(w)
        return last(F.linear(x, w)) + torch.zeros(w.shape, dtype=w.dtype).sum()

    uses, _ = checked(loss, {"w": numbers(4, 3)}, numbers(5, 2, 3))
    assert uses["w"].reason == ""
    assert seen[0] == ((4, 3), DTYPE, "cpu", 4, 2, 4, 12, True)
    assert seen[1] == (True, True, 2, (3, 1), True)


def test_numbers_from_a_parameter_are_constants():
    loss = lambda p, x: last(F.linear(x, p["w"])) * p["w"][0, 0].item() * p["w"].detach()[0].tolist()[1]
    uses, _ = checked(loss, {"w": numbers(4, 3)}, numbers(5, 2, 3))
    assert uses["w"].reason == ""


def test_complex_parameters_are_made():
    torch.manual_seed(0)
    params = {"w": torch.randn(3, 3, dtype=torch.complex128), "v": numbers(3, 3)}
    fun = with_aux(lambda p, x: F.linear(F.linear(x, p["v"]).to(p["w"].dtype), p["w"]).abs().sum())
    uses = TorchTaps().uses(fun, 0, (params, numbers(4, 3)), (None, 0))
    assert [use.reason for use in uses] == ["", "a parameter of dtype complex128"]
    result = TorchTaps().run(fun, 0, (params, numbers(4, 3)), (None, 0), [True, True])
    assert result.untapped == {1: "a parameter of dtype complex128"}
    expected = torch.func.vmap(torch.func.grad(lambda p, x: fun(p, x)[0]), (None, 0))(params, numbers(4, 3))
    torch.testing.assert_close(result.gradients[1].rows, expected["w"])
    assert distance({"v": remade(result.gradients[0], (3, 3), 4)}, {"v": expected["v"]}) < 1e-10


def test_parameters_of_a_special_kind_are_made():
    class Special(torch.Tensor):
        pass

    params = {"w": torch.ones(3, 3).as_subclass(Special), "v": torch.ones(3, 3)}
    found = TorchTaps().uses(with_aux(lambda p, x: F.linear(x, p["v"]).sum()), 0, (params, torch.ones(4, 3)), (None, 0))
    assert [use.reason for use in found] == ["", "a parameter of type Special"]
