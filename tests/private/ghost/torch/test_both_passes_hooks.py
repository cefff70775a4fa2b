"""Hooks on gradients: under each method the sum is that of one example after the other, or an error names the hook."""

from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as modules
from torch.utils.checkpoint import checkpoint

import fresh_process
import gradclip

WIDTH = 512
METHODS = ("materialize", "auto", "ghost")


class Net(nn.Module):
    """Two layers within a module. Factors take less time than gradients. `between` may change the hidden values."""

    def __init__(self, between):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, 4)
        self.between = between

    def forward(self, x):
        return self.last(self.between(self.first(x)))


def clipped(net, method, run=None):
    """Return the clipped function and its arguments."""

    def loss(params, x, y):
        made = torch.func.functional_call(net, params, (x,)) if run is None else run(params, x)
        return F.cross_entropy(made, y)

    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2))
    made = gradclip.clipped_grad(loss, 1e3, batch_argnums=(1, 2), method=method)
    return made, (dict(net.named_parameters()), x, torch.arange(8) % 4)


def summed(net, method, run=None):
    """Return the clipped sum as one vector."""
    made, args = clipped(net, method, run)
    return torch.cat([x.double().ravel() for x in made(*args).values()])


def check(net, method, refused="", run=None):
    """Check that the sum is that of the loop, or else that an error says what is in `refused`."""
    if refused:
        with pytest.raises((RuntimeError, ValueError), match=refused):
            summed(net, method, run)
    else:
        torch.testing.assert_close(summed(net, method, run), summed(net, "loop", run), rtol=1e-4, atol=1e-5)


def by_factors(method):
    """Return what the error says where only the method that insists on factors is refused."""
    return "factors do not run hooks" if method == "ghost" else ""


def same(h):
    return h


def tenth(g):
    return g * 0.1


def tenths(gradients):
    return tuple(g if g is None else g * 0.1 for g in gradients)


def written(g):
    g.mul_(0.1)


def on_hidden(hook):
    def between(h):
        h.register_hook(hook)
        return h

    return between


def if_required(h):
    if h.requires_grad:
        h.register_hook(tenth)
    return h


def in_a_try(h):
    with suppress(RuntimeError):
        h.register_hook(tenth)
    return h


def on_a_view(h):
    view = h.view(-1)
    view.register_hook(tenth)
    return view.view(h.shape)


def on_grad_fn(h):
    h.grad_fn.register_hook(lambda given, _: tenths(given))
    return h


def on_several(h):
    torch.autograd.graph.register_multi_grad_hook([h], lambda gradients: None)
    return h


class Tenth(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g * 0.1


TENSORS = {
    "one that scales": on_hidden(tenth),
    "one that writes in place": on_hidden(written),
    "one that only looks": on_hidden(lambda g: None),
    "where a gradient is required": if_required,
    "in a try": in_a_try,
    "on a view": on_a_view,
    "on a node of the graph": on_grad_fn,
    "on several tensors": on_several,
}


def test_without_hooks_gradients_come_in_factors():
    made, args = clipped(Net(same), "auto")
    assert made.plan(*args).ghost


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("method", METHODS)
def test_hooks_on_tensors(kind, method):
    check(Net(TENSORS[kind]), method, by_factors(method))


def test_a_hook_changes_the_sum():
    assert summed(Net(on_hidden(tenth)), "loop").norm() < 0.9 * summed(Net(same), "loop").norm()


@pytest.mark.parametrize("method", METHODS)
def test_the_backward_pass_of_an_autograd_function_counts(method):
    check(Net(Tenth.apply), method)
    assert summed(Net(Tenth.apply), method).norm() < 0.9 * summed(Net(same), method).norm()


def hooked_output(module, inputs, output):
    output.register_hook(tenth)


MODULES = {
    "full": lambda net: net.first[0].register_full_backward_hook(lambda m, given, out: tenths(given)),
    "full of a module of modules": lambda net: net.first.register_full_backward_hook(lambda m, given, out: None),
    "before": lambda net: net.first[0].register_full_backward_pre_hook(lambda m, out: tenths(out)),
    "old": lambda net: net.last.register_backward_hook(lambda m, given, out: tenths(given)),
    "of all modules": lambda net: modules.register_module_full_backward_hook(lambda m, given, out: tenths(given)),
    "before all modules": lambda net: modules.register_module_full_backward_pre_hook(lambda m, out: tenths(out)),
    "in a forward hook": lambda net: net.first[0].register_forward_hook(hooked_output, always_call=True),
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:Using a non-full backward hook")
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("method", METHODS)
def test_hooks_of_modules(kind, method):
    net = Net(same)
    handle = MODULES[kind](net)
    try:
        by_vmap = "" if kind in ("old", "in a forward hook") else "backward hooks of modules need it|a backward hook"
        check(net, method, by_vmap or by_factors(method))
    finally:
        handle.remove()


@pytest.mark.parametrize("method", METHODS)
def test_forward_hooks_run_in_the_forward_pass(method):
    net = Net(same)
    net.first.register_forward_hook(lambda m, given, out: 0.1 * out, always_call=True)
    check(net, method)


@pytest.mark.parametrize("method", METHODS)
def test_hooks_in_a_checkpointed_part_are_refused(method):
    net = Net(on_hidden(tenth))

    def run(params, x):
        return checkpoint(lambda x: torch.func.functional_call(net, params, (x,)), x, use_reentrant=False)

    check(net, method, by_factors(method) or 'pass method="loop"', run)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("method", ["loop", *METHODS])
def test_hooks_of_parameters_are_refused_until_they_are_removed(kind, method):
    net = Net(same)
    handle = getattr(net.first[0].weight, kind)(lambda x: None)
    with pytest.raises(ValueError, match=r"\['first.0.weight'\] has a hook.*pre_clipping_transform"):
        summed(net, method)
    handle.remove()
    assert summed(net, method).norm() > 0


@pytest.mark.parametrize("method", METHODS)
def test_hooks_on_parameters_within_the_loss(method):
    net = Net(same)

    def run(params, x):
        params["first.0.weight"].register_hook(tenth)
        return torch.func.functional_call(net, params, (x,))

    check(net, method, by_factors(method), run)


@pytest.mark.parametrize("method", ["auto", "ghost"])
def test_a_hook_that_comes_after_the_plan_counts(method):
    net = Net(same)
    made, args = clipped(net, method)
    made(*args)
    net.between = on_hidden(tenth)
    if method == "ghost":
        with pytest.raises(ValueError, match=r"Tensor.register_hook is called. Pass method='auto'"):
            made(*args)
    else:
        expected = clipped(net, "loop")[0](*args)
        for name, x in made(*args).items():
            torch.testing.assert_close(x, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("method", "calls"), [("loop", 8), ("materialize", 1), ("auto", 1)])
def test_a_hook_that_only_looks_is_called_for_each_example_or_once_for_all(method, calls):
    seen = []
    summed(Net(on_hidden(lambda g: seen.append(tuple(g.shape)))), method)
    assert seen == [(1, WIDTH)] * calls


def compiled(net, method):
    """Return the clipped sum of compiled code as one vector, as a function without arguments."""
    made, args = clipped(net, method)
    torch.compiler.reset()
    made = torch.compile(made, backend="eager")
    return lambda: torch.cat([x.double().ravel() for x in made(*args).values()])


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("register_hook", "loop"),
        ("register_hook", "materialize"),
        ("register_hook", "auto"),
        ("register_post_accumulate_grad_hook", "auto"),
    ],
)
def test_compiled_code_refuses_hooks_of_parameters_until_they_are_removed(kind, method):
    net = Net(same)
    call, expected = compiled(net, method), summed(net, "loop")
    torch.testing.assert_close(call(), expected, rtol=1e-4, atol=1e-5)
    handle = getattr(net.first[0].weight, kind)(lambda x: None)
    with pytest.raises(ValueError, match=r"\['first.0.weight'\] has a hook.*pre_clipping_transform"):
        call()
    handle.remove()
    torch.testing.assert_close(call(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["loop", "materialize", "auto"])
def test_compiled_code_obeys_hooks_on_tensors(method):
    net = Net(on_hidden(tenth))
    torch.testing.assert_close(compiled(net, method)(), summed(net, "loop"), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize(("kind", "method"), [("full", "loop"), ("full", "materialize"), ("before", "auto")])
def test_compiled_code_obeys_backward_hooks_of_modules_or_fails(kind, method):
    net = Net(same)
    MODULES[kind](net)
    if method == "loop":
        torch.testing.assert_close(compiled(net, method)(), summed(net, "loop"), rtol=1e-4, atol=1e-5)
    else:
        with pytest.raises(RuntimeError, match=r"autograd\.Function with functorch"):
            compiled(net, method)()


COMPILED_FIRST = """
import torch
import gradclip

clipped = gradclip.clipped_grad(lambda w, x: torch.sin(x @ w).sum(), 1.0)
print(torch.compile(clipped, backend="eager", fullgraph=True)(torch.ones(4, 4), torch.ones(3, 4)).shape)
"""


def test_the_first_call_of_a_process_may_be_compiled():
    assert fresh_process.run(COMPILED_FIRST, ".", PYTHONWARNINGS="ignore") == "torch.Size([4, 4])"
