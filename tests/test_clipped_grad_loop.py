"""`method="loop"` beside `vmap`, and beside a training step's own `backward` for what `vmap` cannot do."""

import math
from collections import OrderedDict, UserDict
from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import gradclip

BATCH = 7
MASK = np.array([True, False, True, True, True, False, False])


def loss(params, x, y):
    out = x @ params["w"] + params["b"]
    return ((out - y) ** 2).mean(), {"out": out, "total": out.sum()}


def problem(make):
    rng = np.random.default_rng(0)
    params = {"w": make(np.float32(rng.normal(size=(3, 2)))), "b": make(np.float32([0.5, -1.0]))}
    return params, make(np.float32(rng.normal(size=(BATCH, 3)))), make(np.float32(rng.normal(size=(BATCH, 2))))


def same(found, expected):
    """Compare trees to a few units in the last place of 1."""
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-6, atol=2e-6)


SETTINGS = [
    {"return_values": True, "return_norms": True},
    {"per_layer": True, "keep_batch_dim": False, "return_norms": True},
    {"nonfinite": "zero", "rule": "automatic", "normalize_by": 4.0},
]


def both_ways(make, settings, mask):
    """Return what `vmap` and the loop make of the problem."""
    params, x, y = problem(jnp.asarray if make is jax.jit else make)
    if settings.get("nonfinite") == "zero":
        x[4, 1] = math.nan
    for method in ("vmap", "loop"):
        clipped = gradclip.clipped_grad(loss, 1.0, batch_argnums=(1, 2), has_aux=True, method=method, **settings)
        yield (jax.jit(clipped) if make is jax.jit else clipped)(params, x, y, mask=mask)


@pytest.mark.parametrize("size", [None, 1, 3])
@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "masked"])
@pytest.mark.parametrize("settings", SETTINGS, ids=["outputs", "layers", "rule"])
def test_the_loop_does_what_vmap_does(size, mask, settings):
    by_vmap, by_loop = both_ways(torch.tensor, settings | {"microbatch_size": size}, mask)
    same(by_loop, by_vmap)


@pytest.mark.parametrize("make", [jnp.asarray, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("settings", [SETTINGS[0], SETTINGS[1] | {"microbatch_size": 3}], ids=["whole", "parts"])
def test_the_loop_of_jax_does_what_vmap_does(make, settings):
    by_vmap, by_loop = both_ways(make, settings, MASK)
    same(by_loop, by_vmap)


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("make", [torch.tensor, jnp.asarray], ids=["torch", "jax"])
def test_batches_of_no_example_and_of_one(make, count):
    params, x, y = problem(make)
    sums = [
        gradclip.clipped_grad(loss, 1.0, batch_argnums=(1, 2), has_aux=True, return_norms=True, method=method)(
            params, x[:count], y[:count]
        )
        for method in ("vmap", "loop")
    ]
    same(sums[1], sums[0])
    assert sums[1][1].norms.shape == (count,)


@pytest.mark.parametrize("make", [torch.tensor, jnp.asarray], ids=["torch", "jax"])
def test_several_arguments_groups_and_results(make):
    params, x, y = problem(make)

    def split(w, x, y, b):
        return loss({"w": w, "b": b}, x, y)[0]

    for settings in ({"argnums": (3, 0)}, {"argnums": (0,)}):
        calls = [
            gradclip.clipped_grad(split, 1.0, batch_argnums=(1, 2), method=method, **settings)(
                params["w"], x, y, params["b"]
            )
            for method in ("vmap", "loop")
        ]
        assert isinstance(calls[1], tuple)
        same(calls[1], calls[0])
    totals = [gradclip.clipped_fun(lambda x: {"s": x.sum(0)}, 1.0, method=m)(x) for m in ("vmap", "loop")]
    same(totals[1], totals[0])


def test_the_sum_that_a_client_trains_for():
    def update(x):
        w = torch.zeros(2, requires_grad=True)
        torch.nn.functional.softplus(-(x @ w).sum()).backward()
        return w.grad

    summed = gradclip.clipped_fun(update, 1.0, keep_batch_dim=False, method="loop")(torch.tensor([[6.0, 8.0], [1, 0]]))
    torch.testing.assert_close(summed, torch.tensor([-0.6 - 0.5, -0.8]))


def test_dropout_is_drawn_for_each_example():
    torch.manual_seed(0)
    clipped = gradclip.clipped_grad(lambda p, x: (p * torch.nn.functional.dropout(x)).sum(), 1e6, method="loop")
    kept = clipped(torch.ones(64), torch.ones(16, 64)) / 2.0
    assert 0.0 < kept.min() < kept.max() < 16.0


def test_a_callback_that_has_no_batching_rule():
    def square(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda v: np.asarray(v) ** 2, shape, x)

    fun = lambda p, x: (p * square(x)).sum()
    batch = jnp.array([[3.0, 4.0], [0.1, 0.2]])
    with pytest.raises(Exception, match="vmap"):
        gradclip.clipped_grad(fun, 100.0)(jnp.ones(2), batch)
    for call in (gradclip.clipped_grad(fun, 100.0, method="loop"),):
        np.testing.assert_allclose(call(jnp.ones(2), batch), [9.01, 16.04], rtol=1e-6)
        np.testing.assert_allclose(jax.jit(call)(jnp.ones(2), batch), [9.01, 16.04], rtol=1e-6)


# What vmap cannot do


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


KINDS = ["GRU", "RNN", "GRUCell", "RNNCell", "LSTMCell", "checkpoint", "item", "branch", "buffer", "sparse"]


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
    with pytest.raises(RuntimeError, match=r'torch.func.vmap cannot.*For one example it works: pass method="loop"'):
        gradclip.clipped_grad(fun, 1.0)(dict(model.named_parameters()), x)


@pytest.mark.parametrize("method", ["vmap", "loop"])
def test_an_error_of_the_function_itself_stays(method):
    def wrong(params, x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        gradclip.clipped_grad(wrong, 1.0, method=method)(torch.ones(2), torch.ones(3, 2))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        gradclip.clipped_grad(lambda p, x: x @ p, 1.0, method=method)(torch.ones(3, 3), torch.ones(3, 2))


def test_a_loss_that_is_no_scalar_in_the_loop():
    with pytest.raises(ValueError, match=r"must return a scalar tensor for each example, got Tensor of shape .*1, 2"):
        gradclip.clipped_grad(lambda p, x: p * x, 1.0, method="loop")(torch.ones(2), torch.ones(3, 2))
    with pytest.raises(ValueError, match="got float of shape None"):
        gradclip.clipped_grad(lambda p, x: 1.0, 1.0, method="loop")(torch.ones(2), torch.ones(3, 2))


def test_checkpointing_with_other_parameters_than_the_modules():
    # `checkpoint` computes again when `functional_call` is over, with what the module holds itself.
    model, x = case("checkpoint")
    params = {name: 2.0 * p.detach() for name, p in model.named_parameters()}
    clipped = gradclip.clipped_grad(
        lambda params, x: functional_call(model, params, (x,)).square().sum(), 1.0, method="loop"
    )
    with pytest.raises(RuntimeError, match="again with the module's own parameters, which are not those"):
        clipped(params, x)


# BatchNorm


def normalising(**settings):
    return torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2, **settings))


def sum_of_squares(model):
    return lambda params, x: functional_call(model, params, (x,)).square().sum()


@pytest.mark.parametrize("method", ["vmap", "loop"])
def test_batch_norm(method):
    images = torch.randn(3, 1, 5, 5, generator=torch.Generator().manual_seed(0))
    model = normalising()
    clipped, params = gradclip.clipped_grad(sum_of_squares(model), 1.0, method=method), dict(model.named_parameters())
    with pytest.raises(RuntimeError, match=r"BatchNorm2d in training mode mixes the examples.*GroupNorm.*\.eval\(\)"):
        clipped(params, images)
    assert int(model[1].num_batches_tracked) == 0
    model.eval()
    assert float(clipped(params, images)["1.weight"].abs().sum()) > 0
    model = normalising(track_running_stats=False)
    clipped = gradclip.clipped_grad(sum_of_squares(model), 1.0, method=method)
    with pytest.warns(UserWarning, match="BatchNorm2d with track_running_stats=False normalises each example alone"):
        clipped(dict(model.named_parameters()), images)


@pytest.mark.parametrize("method", ["vmap", "loop"])
def test_batch_norm_over_a_group_that_is_clipped_as_one(method):
    model = normalising(track_running_stats=False)
    clipped = gradclip.clipped_grad(sum_of_squares(model), 1.0, method=method, keep_batch_dim=False, unit="group")
    assert clipped(dict(model.named_parameters()), torch.randn(3, 4, 1, 5, 5))["1.weight"].shape == (2,)
    assert not torch.nn.modules.module._global_forward_pre_hooks


# Parameters that a loss does not use


def silent_linear():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 2)


@pytest.mark.parametrize("method", ["vmap", "loop"])
@pytest.mark.parametrize("trainable", [True, False])
def test_a_loss_that_closes_over_the_module(method, trainable):
    model = silent_linear().requires_grad_(trainable)
    params = {name: p.detach() for name, p in model.named_parameters()}
    clipped = gradclip.clipped_grad(lambda params, x: model(x).square().sum(), 1.0, method=method)
    with pytest.warns(UserWarning, match=r"does not use argument 0\['bias'\], argument 0\['weight'\]: .* zero"):
        summed = clipped(params, torch.ones(3, 4))
    assert not any(x.any() for x in summed.values())
    assert not any(x.any() for x in clipped(params, torch.ones(3, 4)).values())  # said once


@pytest.mark.parametrize("method", ["vmap", "loop"])
def test_a_misspelt_name(method):
    model = silent_linear()
    clipped = gradclip.clipped_grad(
        lambda p, x: functional_call(model, {"weight": p["weight"], "bais": p["bias"]}, (x,)).square().sum(),
        1.0,
        method=method,
    )
    with pytest.warns(UserWarning, match=r"does not use argument 0\['bias'\]: these gradients are zero"):
        assert clipped(dict(model.named_parameters()), torch.ones(3, 4))["weight"].any()


@pytest.mark.parametrize("method", ["vmap", "loop"])
def test_gradients_that_are_zero_though_used_are_not_warned_of(method):
    params = {"a": torch.zeros(3, 2), "b": torch.ones(2)}  # as in low-rank updates, which start at zero
    clipped = gradclip.clipped_grad(lambda p, x: (x @ p["a"] @ (0 * p["b"])).sum(), 1.0, method=method)
    assert not clipped(params, torch.ones(4, 3))["a"].any()
    masked = gradclip.clipped_grad(lambda p, x: (x * p["b"]).sum(), 1.0, method=method)
    assert not masked({"b": torch.ones(2)}, torch.ones(4, 2), mask=[False] * 4)["b"].any()


# What is passed


@pytest.mark.parametrize("method", ["vmap", "loop"])
def test_modules_and_generators_are_no_parameters(method):
    model = silent_linear()
    clipped = gradclip.clipped_grad(sum_of_squares(model), 1.0, method=method)
    for given in (model, [model], model.parameters(), model.named_parameters(), UserDict(model.named_parameters())):
        with pytest.raises(TypeError, match=r"argument 0 (holds a|is a) .*pass dict\("):
            clipped(given, torch.ones(3, 4))
    second = gradclip.clipped_grad(lambda x, p: (x * p).sum(), 1.0, argnums=1, batch_argnums=0, method=method)
    with pytest.raises(TypeError, match=r"argument 1 is a generator, as of model.parameters"):
        second(torch.ones(3, 4), model.parameters())


class Encoding(UserDict):
    """A tokenizer's result, whose entries are attributes, too."""

    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


def encoded(x, y):
    return Encoding({"x": x, "more": [UserDict({"y": y}), None]})


CALLS = {("torch", "vmap"): torch.tensor, ("torch", "loop"): torch.tensor, ("jax", "vmap"): jnp.asarray}


@pytest.mark.parametrize(("framework", "method"), CALLS)
def test_a_batch_in_a_mapping_of_its_own(framework, method):
    params, x, y = problem(CALLS[framework, method])
    expected = gradclip.clipped_grad(lambda p, x, y: loss(p, x, y)[0], 1.0, batch_argnums=(1, 2))(params, x, y)

    def fun(params, batch):
        assert isinstance(batch, Encoding)
        assert batch.x.shape == (1, 3)
        return loss(params, batch.x, batch["more"][0]["y"])[0]

    batch = encoded(x, y)
    same(gradclip.clipped_grad(fun, 1.0, microbatch_size=3, method=method)(params, batch), expected)
    assert batch.x is x


@jax.tree_util.register_pytree_node_class
class Frozen(Mapping):
    """A mapping that JAX knows, as Flax's frozen dicts are."""

    def __init__(self, entries):
        self.entries = entries

    def __getitem__(self, key):
        return self.entries[key]

    def __iter__(self):
        return iter(self.entries)

    def __len__(self):
        return len(self.entries)

    def tree_flatten(self):
        return (self.entries,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_mappings_that_jax_knows_are_trees():
    params, x, y = problem(jnp.asarray)
    clipped = gradclip.clipped_grad(lambda p, batch: loss(p, batch["x"], batch["y"])[0], 1.0)
    found = clipped(Frozen(params), Frozen({"x": x, "y": y}))
    assert isinstance(found, Frozen)
    same(dict(found), clipped(params, {"x": x, "y": y}))


@pytest.mark.parametrize("kind", [MappingProxyType, OrderedDict, UserDict, dict])
def test_mappings_that_cannot_be_written(kind):
    params, x, y = problem(torch.tensor)
    clipped = gradclip.clipped_grad(lambda p, batch: loss(p, batch["x"], batch["y"])[0], 1.0)
    expected = gradclip.clipped_grad(lambda p, x, y: loss(p, x, y)[0], 1.0, batch_argnums=(1, 2))(params, x, y)
    same(clipped(params, kind({"x": x, "y": y})), expected)


def test_a_mapping_that_cannot_be_made_again():
    class Fixed(UserDict):
        def __setitem__(self, key, value):
            if "x" in self.data:
                raise TypeError("fixed")
            super().__setitem__(key, value)

    with pytest.raises(TypeError, match=r"(?s)a batch of type Fixed cannot be made again .*: pass dict\(...\) of it"):
        gradclip.clipped_grad(lambda p, b: (p * b["x"]).sum(), 1.0, method="loop")(
            torch.ones(2), Fixed({"x": torch.ones(3, 2)})
        )


def test_methods_are_two():
    with pytest.raises(ValueError, match="method must be 'vmap' or 'loop', got 'map'"):
        gradclip.clipped_grad(loss, 1.0, method="map")
    assert gradclip.clipped_grad(loss, 1.0, batch_argnums=(1, 2), method="loop").sensitivity().bound == 1.0


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_the_loop_is_not_named_where_it_has_no_gradient_either():
    layer = torch.nn.Linear(4, 2)

    def fun(params, x):  # this way of checkpointing sees only inputs that ask for gradients: here none does
        return checkpoint(lambda x: functional_call(layer, params, (x,)), x, use_reentrant=True).sum()

    with pytest.raises(RuntimeError) as found:
        gradclip.clipped_grad(fun, 1.0)(dict(layer.named_parameters()), torch.ones(3, 4))
    assert "loop" not in str(found.value)
    clipped = gradclip.clipped_grad(fun, 1.0, method="loop")
    with pytest.warns(UserWarning, match=r"does not use argument 0\['bias'\]"):
        clipped(dict(layer.named_parameters()), torch.ones(3, 4))
