"""What `torch.func.vmap` cannot do and `method="loop"` can, beside a training step's own `backward`."""

import math
import threading

import pytest
import torch
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import gradclip


class Last(torch.nn.Module):
    """A recurrent network's last output."""

    def __init__(self, kind):
        super().__init__()
        self.net = getattr(torch.nn, kind)(4, 3, **({} if kind.endswith("Cell") else {"batch_first": True}))

    def forward(self, x):
        if isinstance(self.net, torch.nn.RNNCellBase):
            out = self.net(x[:, 0])
            return out[0] if isinstance(out, tuple) else out
        return self.net(x)[0][:, -1]


class Other(torch.nn.Module):
    """Two layers, and one thing in between that vmap cannot do."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.second, self.third = (torch.nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        hidden = torch.tanh(self.first(x.mean(1)))
        if self.kind == "checkpoint":
            return self.third(checkpoint(lambda h: torch.tanh(self.second(h)), hidden, use_reentrant=False))
        if self.kind == "item":
            hidden = hidden * hidden.detach().max().item()
        if self.kind == "branch":
            hidden = hidden if hidden.sum() > 0 else -2 * hidden
        if self.kind == "buffer":
            self.calls += 1
        return self.third(self.second(hidden))


RUN_AGAIN = ["GRU", "RNN", "GRUCell", "RNNCell", "LSTMCell", "checkpoint"]
KINDS = [*RUN_AGAIN, "item", "branch", "buffer", "sparse"]


def case(kind):
    """Return a model in float64 and a batch."""
    torch.manual_seed(0)
    if kind == "sparse":
        return torch.nn.Embedding(6, 3, sparse=True).double(), torch.tensor([[1, 2], [3, 3], [5, 0], [2, 4], [4, 2]])
    model = Last(kind) if hasattr(torch.nn, kind) else Other(kind)
    return model.double(), torch.randn(5, 6, 4, dtype=torch.float64)


def by_backward(model, x, max_norm):
    """Return the clipped sum of what `backward` leaves in `.grad`, example by example, and the norms."""
    total, norms = {name: torch.zeros_like(p) for name, p in model.named_parameters()}, []
    for i in range(len(x)):
        model.zero_grad()
        model(x[i : i + 1]).square().sum().backward()
        grads = {name: p.grad.to_dense() for name, p in model.named_parameters() if p.grad is not None}
        norms.append(math.sqrt(sum(float(g.square().sum()) for g in grads.values())))
        for name, grad in grads.items():
            total[name] += grad * min(1.0, max_norm / norms[-1])
    model.zero_grad()
    return {name: x.detach() for name, x in total.items()}, norms


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [None, 2])
def test_what_works_in_training_works_in_the_loop(kind, size):
    model, x = case(kind)
    params = dict(model.named_parameters())

    def fun(params, x):
        return functional_call(model, params, (x,)).square().sum()

    expected, norms = by_backward(model, x, sorted(norms_of(model, x))[2])
    clipped = gradclip.clipped_grad(
        fun, sorted(norms)[2], method="loop", microbatch_size=size, return_norms=True, return_values=True
    )
    summed, outputs = clipped(params, x)
    torch.testing.assert_close(summed, expected)
    torch.testing.assert_close(outputs.norms, torch.tensor(norms, dtype=torch.float64))
    assert outputs.values.shape == (5,)
    assert all(p.grad is None and p.requires_grad for p in params.values())


def norms_of(model, x):
    return by_backward(model, x, 1.0)[1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_of_vmap_names_the_loop(kind):
    model, x = case(kind)
    fun = lambda params, x: functional_call(model, params, (x,)).square().sum()
    with pytest.raises(RuntimeError, match=r'vmap cannot run .*For one example it works: pass method="loop"'):
        gradclip.clipped_grad(fun, 1.0, method="materialize")(dict(model.named_parameters()), x)


@pytest.mark.parametrize("method", ["auto", "ghost"])
@pytest.mark.parametrize("kind", RUN_AGAIN)
@pytest.mark.parametrize("size", [None, 2])
def test_small_recurrent_and_checkpointed_models_run_at_once(kind, size, method):
    model, x = case(kind)
    expected, norms = by_backward(model, x, sorted(norms_of(model, x))[2])
    clipped = gradclip.clipped_grad(
        lambda params, x: functional_call(model, params, (x,)).square().sum(),
        sorted(norms)[2],
        method=method,
        microbatch_size=size,
        return_norms=True,
    )
    summed, outputs = clipped(dict(model.named_parameters()), x)
    torch.testing.assert_close(summed, expected)
    torch.testing.assert_close(outputs.norms, torch.tensor(norms, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["item", "branch", "buffer", "sparse"])
def test_auto_names_the_loop_for_what_no_way_runs_at_once(kind):
    model, x = case(kind)
    fun = lambda params, x: functional_call(model, params, (x,)).square().sum()
    with pytest.raises(RuntimeError, match=r'vmap cannot run .*For one example it works: pass method="loop"'):
        gradclip.clipped_grad(fun, 1.0)(dict(model.named_parameters()), x)


def test_a_checkpoint_of_which_nothing_comes_in_factors():
    norm, x = torch.nn.LayerNorm(4).double(), torch.randn(5, 4, dtype=torch.float64)
    fun = lambda params, x: checkpoint(lambda x: functional_call(norm, params, (x,)), x, use_reentrant=False)[0, 1]
    params = dict(norm.named_parameters())
    clipped = gradclip.clipped_grad(fun, 1e6)
    assert [leaf.how for leaf in clipped.plan(params, x).leaves] == ["autograd", "autograd"]
    torch.testing.assert_close(clipped(params, x), gradclip.clipped_grad(fun, 1e6, method="loop")(params, x))


def test_a_loss_that_is_no_scalar_in_the_loop():
    with pytest.raises(ValueError, match=r"must return one number for each example, got an array of shape \(1, 2\)"):
        gradclip.clipped_grad(lambda p, x: p * x, 1.0, method="loop")(torch.ones(2), torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"got a float, which has no gradient\. Return the tensor, without \.item"):
        gradclip.clipped_grad(lambda p, x: 1.0, 1.0, method="loop")(torch.ones(2), torch.ones(3, 2))


def test_checkpointing_with_other_parameters_than_the_modules():
    # `checkpoint` computes again when `functional_call` is over, with what the module holds itself.
    model, x = case("checkpoint")
    params = {name: 2.0 * p.detach() for name, p in model.named_parameters()}
    clipped = gradclip.clipped_grad(
        lambda params, x: functional_call(model, params, (x,)).square().sum(), 1.0, method="loop"
    )
    with pytest.raises(RuntimeError, match="again with the module's own parameters, which are not the para"):
        clipped(params, x)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("method", ["loop", "materialize", "ghost", "auto"])
def test_checkpoints_that_lose_gradients_are_refused(method):
    model, x = case("checkpoint")

    def fun(params, x):  # this way of checkpointing sees only inputs that ask for gradients: here none does
        both = lambda p, x: functional_call(model.third, p, (x,))
        hidden = checkpoint(both, {name[6:]: p for name, p in params.items() if "third" in name}, x, use_reentrant=True)
        return hidden.sum() + params["first.weight"].sum()

    with pytest.raises(RuntimeError, match=r"use_reentrant=True loses gradients here\. Pass use_reentrant=False"):
        gradclip.clipped_grad(fun, 1.0, method=method)(dict(model.named_parameters()), x)


@pytest.mark.parametrize("keep", [True, False])
def test_a_row_is_laid_out_alike_at_every_place(keep):
    """The last bits of a matrix product depend on how its operands are aligned, and on their strides."""
    seen = []

    def fun(w, x):
        seen.append((x.data_ptr() % 64, x.stride()))
        return (x @ w).sum()

    clipped = gradclip.clipped_grad(fun, 1.0, method="loop", keep_batch_dim=keep)
    for batch in (torch.randn(9, 7), torch.randn(7, 5).T, torch.randn(4, 14)[:, ::2]):
        clipped(torch.randn(7), batch)
    assert len({*seen}) == 1


@pytest.mark.parametrize("made_here", [False, True])
@pytest.mark.parametrize("method", ["materialize", "loop"])
def test_inference_mode_changes_nothing(method, made_here):
    params, x, scale = {"w": torch.randn(5, 2)}, torch.randn(6, 5), torch.rand(2)
    clipped = gradclip.clipped_grad(
        lambda p, x, scale: (x @ p["w"] * scale).square().sum(), 1.0, batch_argnums=1, method=method
    )
    expected = clipped(params, x, scale)
    with torch.inference_mode():
        if made_here:
            params, x, scale = {"w": params["w"].clone()}, x.clone(), scale.clone()
        found = clipped(params, x, scale)
    assert found["w"].any()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class InAnotherThread(torch.autograd.Function):
    """Runs a function in another thread, in the forward pass and in the backward pass."""

    @staticmethod
    def forward(ctx, x, run):
        ctx.run = run
        run(1.0)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        ctx.run(2.0)
        return gradient * 2, None


def test_modules_of_other_threads_are_left_alone():
    theirs, raised = torch.nn.Linear(2, 2), []

    def run(scale):
        params = {name: scale * p.detach() for name, p in theirs.named_parameters()}

        def call():
            try:
                functional_call(theirs, params, (torch.ones(1, 2),))
            except RuntimeError as error:
                raised.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    clipped = gradclip.clipped_grad(lambda w, x: InAnotherThread.apply(w * x, run).sum(), 9.0, method="loop")
    assert clipped(torch.ones(3), torch.tensor([[1.0, 2.0, 0.5]])).tolist() == [2.0, 4.0, 1.0]
    assert not raised
