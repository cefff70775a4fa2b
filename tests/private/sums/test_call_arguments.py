"""What a clipped function is called with: no modules nor generators of parameters; batches in mappings of all kinds."""

from collections import OrderedDict, UserDict
from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import pytest
import torch

import gradclip
from losses import loss, problem, same, silent_linear, sum_of_squares


@pytest.mark.parametrize("method", ["materialize", "loop"])
def test_modules_and_generators_are_no_parameters(method):
    model = silent_linear()
    clipped = gradclip.clipped_grad(sum_of_squares(model), 1.0, method=method)
    for given in (model, [model], model.parameters(), model.named_parameters(), UserDict(model.named_parameters())):
        with pytest.raises(TypeError, match=r"argument 0 (holds a|is a) .*pass dict\("):
            clipped(given, torch.ones(3, 4))
    second = gradclip.clipped_grad(lambda x, p: (x * p).sum(), 1.0, argnums=1, batch_argnums=0, method=method)
    with pytest.raises(TypeError, match=r"argument 1 is a generator, as model.parameters"):
        second(torch.ones(3, 4), model.parameters())


@pytest.mark.parametrize("method", ["materialize", "loop"])
def test_functions_are_no_parameters(method):
    clipped = gradclip.clipped_grad(lambda p, x: (p["w"] * x).sum(), 1.0, method=method)
    with pytest.raises(TypeError, match=r"argument 0 holds a function \(custom_jvp\), which has no gradient\."):
        clipped({"w": jnp.zeros(2), "activation": jax.nn.relu}, jnp.ones((3, 2)))


class Encoding(UserDict):
    """A tokenizer's result, whose entries are attributes, too."""

    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


def encoded(x, y):
    return Encoding({"x": x, "more": [UserDict({"y": y}), None]})


CALLS = {("torch", "materialize"): torch.tensor, ("torch", "loop"): torch.tensor, ("jax", "materialize"): jnp.asarray}


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

    with pytest.raises(TypeError, match=r"(?s)a batch of type Fixed cannot be rebuilt .*: pass dict\(...\) of it"):
        gradclip.clipped_grad(lambda p, b: (p * b["x"]).sum(), 1.0, method="loop")(
            torch.ones(2), Fixed({"x": torch.ones(3, 2)})
        )
