"""What a run takes and leaves: arguments, devices, modes, memory."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gradclip._src.private.ghost.torch.taps import TorchTaps
from tapped_torch import distance, gradients_by_loop, remade, with_aux

DTYPE = torch.float64


def last(y):
    """A loss of any result in which each element counts differently."""
    weights = torch.arange(1, y.numel() + 1, dtype=y.dtype).reshape(y.shape)
    return (torch.sin(y) * weights).sum()


def numbers(*shape):
    return torch.randn(shape, dtype=DTYPE, generator=torch.Generator().manual_seed(sum(shape)))


def test_several_arguments_are_differentiated():
    fun = with_aux(lambda w, x, p: last(F.linear(x, w) @ p[0]) + p[1].sum())
    w, x, p = numbers(4, 3), numbers(5, 2, 3), (numbers(4, 2), numbers(2))
    uses = TorchTaps().uses(fun, (2, 0), (w, x, p), (None, 0, None))
    assert [(use.path, use.shape, use.dtype) for use in uses] == [
        ("argument 2[0]", (4, 2), "float64"),
        ("argument 2[1]", (2,), "float64"),
        ("argument 0", (4, 3), "float64"),
    ]
    result = TorchTaps().run(fun, (2, 0), (w, x, p), (None, 0, None), [True, False, True])
    found = [remade(gradient, use.shape, 5) for gradient, use in zip(result.gradients, uses, strict=True)]
    loss = lambda q, x: fun(q["w"], x, (q["a"], q["b"]))[0]
    expected = gradients_by_loop(loss, {"a": p[0], "b": p[1], "w": w}, x)
    assert distance(dict(zip("abw", found, strict=True)), expected) < 1e-10


def test_batches_may_be_trees_with_nothing_in_places():
    def fun(p, batch, other, keywords):
        assert batch["none"] is None
        assert other is None
        assert keywords["flag"] == "yes"
        value = last(F.embedding(batch["tokens"], p["w"])) * batch["pair"][1]
        return value, {"none": None, "flags": batch["pair"][0]}

    batch = {
        "tokens": torch.tensor([[0, 1], [2, 2], [1, 0]]),
        "pair": (torch.tensor([True, False, True]), numbers(3)),
        "none": None,
    }
    args = ({"w": numbers(4, 2)}, batch, None, {"flag": "yes"})
    result = TorchTaps().run(fun, 0, args, (None, 0, None, None), [True])
    assert result.aux["none"] is None
    assert result.aux["flags"].tolist() == [True, False, True]
    assert result.values.shape == (3,)
    assert result.untapped == {}


def test_other_arguments_go_to_every_example_whole():
    fun = with_aux(lambda p, x, scale: last(F.linear(x, p["w"]) * scale))
    result = TorchTaps().run(fun, 0, ({"w": numbers(4, 3)}, numbers(5, 3), numbers(4)), (None, 0, None), [True])
    assert result.gradients[0][0].terms[0].left.shape == (5, 1, 1, 4)


def test_inputs_may_come_from_inference_mode():
    with torch.inference_mode():
        params, x = {"w": torch.ones(2, 3)}, torch.ones(4, 3)
        result = TorchTaps().run(with_aux(lambda p, x: F.linear(x, p["w"]).sum()), 0, (params, x), (None, 0), [True])
    assert torch.equal(remade(result.gradients[0], (2, 3), 4), torch.ones(4, 2, 3, dtype=DTYPE))


def test_gradients_may_be_off_around():
    params, x = {"w": torch.ones(2, 3, requires_grad=True)}, torch.ones(4, 3)
    with torch.no_grad():
        result = TorchTaps().run(with_aux(lambda p, x: F.linear(x, p["w"]).sum()), 0, (params, x), (None, 0), [True])
    ((term,),) = (part.terms for part in result.gradients[0])
    assert term.left.tolist() == [[[[1.0, 1.0]]]] * 4
    assert not any(x.requires_grad for x in (*term, result.values))
    assert params["w"].grad is None


def test_shapes_alone_are_enough_to_know_the_uses():
    fun = with_aux(lambda p, x: F.linear(x, p["w"], p["b"]).sum())
    args = ({"w": torch.ones(2, 3, device="meta"), "b": torch.ones(2, device="meta")}, torch.ones(4, 3, device="meta"))
    assert [use.reason for use in TorchTaps().uses(fun, 0, args, (None, 0))] == ["bias of linear", ""]


def test_fake_tensors_have_no_taps():
    with FakeTensorMode():
        args = ({"w": torch.ones(2, 3)}, torch.ones(4, 3))
        (use,) = TorchTaps().uses(with_aux(lambda p, x: F.linear(x, p["w"]).sum()), 0, args, (None, 0))
    assert use.shape == (2, 3)
    assert use.reason != ""


def test_nothing_is_tapped_inside_of_a_transform():
    reasons = []

    def outer(x):
        reasons.append(TorchTaps().prevented())
        return x

    assert TorchTaps().prevented() == ""
    torch.func.vmap(outer)(torch.ones(3))
    assert reasons == ["the call is inside a transform of torch.func"]


def test_nothing_is_tapped_by_a_pytorch_that_lacks_a_function(monkeypatch):
    monkeypatch.delattr(torch._C._functorch, "maybe_get_bdim")
    assert TorchTaps().prevented() == "this version of PyTorch lacks what taps need"


def test_buffers_that_change_are_an_error():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("total", torch.zeros(3))

        def forward(self, x):
            self.total.add_(x)
            return self.layer(x)

    module = Counting()
    params = {name: x.detach() for name, x in module.named_parameters()}
    fun = with_aux(lambda p, x: torch.func.functional_call(module, p, (x,)).sum())
    for use in TorchTaps().uses(fun, 0, (params, torch.ones(4, 3)), (None, 0)):
        assert use.reason.startswith("the function fails under torch.func.vmap (")
    with pytest.raises(RuntimeError, match='pass method="loop"'):
        TorchTaps().run(fun, 0, (params, torch.ones(4, 3)), (None, 0), [False, True])


def test_nothing_is_held_after_a_run():
    kept = []

    def loss(p, x):
        y = torch.tanh(F.linear(x, p["w"].t().t(), p["b"]))
        kept.append(weakref.ref(torch._C._functorch.get_unwrapped(y)))
        return last(F.linear(y, p["w"])) + p["w"].norm()

    params = {"w": numbers(3, 3), "b": numbers(3)}
    gc.collect()
    gc.disable()
    try:
        result = TorchTaps().run(with_aux(loss), 0, (params, numbers(4, 3)), (None, 0), [False, True])
        del result
        assert kept[0]() is None
    finally:
        gc.enable()


def test_what_a_function_keeps_of_its_parameters_holds_no_activations():
    kept = []

    def loss(p, x):
        kept.append((p["w"], p["w"].t()))
        return last(torch.tanh(F.linear(x, p["w"])) @ p["w"])

    gc.disable()
    try:
        result = TorchTaps().run(with_aux(loss), 0, ({"w": numbers(3, 3)}, numbers(4, 3)), (None, 0), [True])
        factors = [weakref.ref(x) for part in result.gradients[0] for term in part.terms for x in term]
        assert len(factors) == 4
        del result
        assert [factor() for factor in factors] == [None] * 4
    finally:
        gc.enable()


def test_random_numbers_of_the_caller_go_on():
    fun = with_aux(lambda p, x: F.dropout(F.linear(x, p["w"])).sum())
    args = ({"w": torch.ones(2, 3)}, torch.ones(4, 3))
    torch.manual_seed(0)
    values = [TorchTaps().run(fun, 0, args, (None, 0), [True]).values for _ in range(2)]
    assert not torch.equal(*values)
