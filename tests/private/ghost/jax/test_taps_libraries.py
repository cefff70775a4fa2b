"""Layers of Flax, Equinox and Haiku: which of their parameters are tapped, and that the gradients agree."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import freeze
from jax import lax

from tapped_losses import agrees, rows, tokens, uses

F64 = {"dtype": jnp.float64, "param_dtype": jnp.float64}
KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def dot(terms):
    return [("dot_general", terms)]


def score(tree):
    return sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(tree))


def filled(make, *args, **named):
    """Return what `make` returns, with numbers that no framework computes in the place of floating-point arrays."""
    rng = np.random.default_rng(3)

    def numbers(one):
        floating = isinstance(one, jax.ShapeDtypeStruct) and jnp.issubdtype(one.dtype, jnp.floating)
        return jnp.asarray(rng.normal(size=one.shape) / 2, one.dtype) if floating else one

    return jax.tree.map(numbers, make(*args, **named))


def named(loss, parameters, *rows):
    """Return the uses of each parameter under the last words of its path, and check the gradients."""
    agrees(loss, parameters, *rows)
    paths, _ = jax.tree_util.tree_flatten_with_path(parameters)
    words = [jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value") for path, _ in paths]
    found = uses(loss, parameters, *rows)
    return {"/".join(word.split("/")[-2:]): one for word, one in zip(words, found, strict=True)}


class Table(nn.Module):
    @nn.compact
    def __call__(self, x):
        table = nn.Embed(7, 4, **F64)
        return table.attend(nn.tanh(nn.Dense(4, **F64)(table(x))))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(nn.Dense(4, **F64)(nn.LayerNorm(**F64)(x))), None


class Layers(nn.Module):
    block: type[nn.Module] = Block
    shared: bool = False

    @nn.compact
    def __call__(self, x):
        each = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        all_alike = {"variable_broadcast": "params", "split_rngs": {"params": False}}
        return nn.scan(self.block, length=3, **(all_alike if self.shared else each))()(x, None)[0]


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.WeightNorm(nn.Dense(4, **F64))(x)


DENSE = {"bias": "add", "kernel": dot(5)}
HEADS = {f"{name}/{leaf}": use for name in ("key", "out", "query", "value") for leaf, use in DENSE.items()}
STACKED = {"Dense_0/bias": "add", "Dense_0/kernel": dot(5), "LayerNorm_0/bias": "add", "LayerNorm_0/scale": "mul"}
LINEN = {
    "Dense": (nn.Dense(4, **F64), (5, 3), {"params/bias": "add", "params/kernel": dot(5)}),
    "DenseGeneral": (
        nn.DenseGeneral((2, 3), axis=(-2, -1), **F64),
        (5, 4, 3),
        {"params/bias": "add", "params/kernel": dot(5)},
    ),
    "Embed": (
        Table(),
        None,
        {
            "Dense_0/bias": "add",
            "Dense_0/kernel": dot(6),
            "Embed_0/embedding": [("embedding", 6), ("dot_general", 6)],
        },
    ),
    "MultiHeadDotProductAttention": (
        nn.MultiHeadDotProductAttention(num_heads=2, **F64),
        (5, 4),
        HEADS,
    ),
    "LayerNorm": (nn.LayerNorm(**F64), (5, 4), {"params/bias": "add", "params/scale": "mul"}),
    "Conv": (
        nn.Conv(4, (3, 3), strides=2, **F64),
        (1, 6, 6, 2),
        {"params/bias": "add", "params/kernel": [("conv_general_dilated", 9)]},
    ),
    "WeightNorm": (
        Norm(),
        (5, 4),
        {"Dense_0/bias": "add", "Dense_0/kernel": "mul", "WeightNorm_0/Dense_0/kernel/scale": "mul"},
    ),
    "scan": (
        Layers(),
        (5, 4),
        STACKED,
    ),
    "scan of one block": (
        Layers(shared=True),
        (5, 4),
        {**STACKED, "Dense_0/kernel": dot(15)},
    ),
    "scan and remat": (
        Layers(nn.remat(Block, prevent_cse=False)),
        (5, 4),
        STACKED,
    ),
    "OptimizedLSTMCell": (
        nn.RNN(nn.OptimizedLSTMCell(4, **F64)),
        (1, 5, 3),
        {f"h{gate}/bias": "add" for gate in "fgio"} | {f"{x}{gate}/kernel": dot(5) for x in "hi" for gate in "fgio"},
    ),
    "GRUCell": (
        nn.RNN(nn.GRUCell(4, **F64)),
        (1, 5, 3),
        {f"{cell}/bias": "add" for cell in ("hn", "in", "ir", "iz")}
        | {f"{x}{gate}/kernel": dot(5) for x in "hi" for gate in "nrz"},
    ),
}


@pytest.mark.parametrize("name", LINEN)
def test_linen(name):
    module, shape, expected = LINEN[name]
    x = tokens(6) if shape is None else rows(*shape)
    parameters = freeze(filled(jax.eval_shape, lambda x: module.init(KEY, x[0]), x))
    found = named(lambda p, x: score(module.apply(p, x)), parameters, x)
    assert found == {"/".join(path.split("/")[-2:]): use for path, use in expected.items()}


NNX = {
    "Linear": (lambda r: nnx.Linear(3, 4, rngs=r, **F64), (5, 3), {"bias": "add", "kernel": dot(5)}),
    "MultiHeadAttention": (
        lambda r: nnx.MultiHeadAttention(2, 4, decode=False, rngs=r, **F64),
        (5, 4),
        HEADS,
    ),
    "Sequential": (
        lambda r: nnx.Sequential(nnx.Linear(3, 4, rngs=r, **F64), nnx.relu, nnx.LayerNorm(4, rngs=r, **F64)),
        (5, 3),
        {"0/bias": "add", "0/kernel": dot(5), "2/bias": "add", "2/scale": "mul"},
    ),
}


@pytest.mark.parametrize("name", NNX)
def test_nnx(name):
    make, shape, expected = NNX[name]
    graph, parameters, rest = nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)
    assert named(lambda p, x: score(nnx.merge(graph, p, rest)(x)), parameters, rows(*shape)) == expected


EQUINOX = {
    "Linear": (eqx.nn.Linear, (3, 4), lambda m, x: jax.vmap(m)(x), (5, 3), {"weight": dot(5), "bias": "add"}),
    "MLP": (
        eqx.nn.MLP,
        (3, 4, 8, 1),
        lambda m, x: m(x),
        (3,),
        {"0/weight": dot(1), "0/bias": "add", "1/weight": dot(1), "1/bias": "add"},
    ),
    "Embedding": (eqx.nn.Embedding, (7, 4), lambda m, x: jax.vmap(m)(x), None, {"weight": [("embedding", 6)]}),
    "MultiheadAttention": (
        eqx.nn.MultiheadAttention,
        (2, 4),
        lambda m, x: m(x, x, x),
        (5, 4),
        {f"{name}_proj/weight": dot(5) for name in ("query", "key", "value", "output")},
    ),
    "LSTMCell": (
        eqx.nn.LSTMCell,
        (3, 4),
        lambda m, x: lax.scan(lambda state, x: (m(x, state), None), (jnp.zeros(4), jnp.zeros(4)), x)[0],
        (5, 3),
        {"weight_ih": dot(5), "weight_hh": dot(5), "bias": "add"},
    ),
}


@pytest.mark.parametrize("name", EQUINOX)
def test_equinox(name):
    kind, sizes, called, shape, expected = EQUINOX[name]
    parameters, static = eqx.partition(filled(eqx.filter_eval_shape, kind, *sizes, key=KEY), eqx.is_inexact_array)
    x = tokens(6) if shape is None else rows(*shape)
    assert named(lambda p, x: score(called(eqx.combine(p, static), x)), parameters, x) == expected


def unrolled(core):
    return lambda x: hk.dynamic_unroll(cell := core(4), x, cell.initial_state(None))[0]


HAIKU = {
    "Linear": (lambda x: hk.Linear(4)(x), (5, 3), {"linear/b": "broadcast_in_dim", "linear/w": dot(5)}),
    "LSTM": (unrolled(hk.LSTM), (5, 3), {"linear/b": "add", "linear/w": dot(5)}),
    "GRU": (unrolled(hk.GRU), (5, 3), {"gru/b": "add", "gru/w_h": dot(5) * 2, "gru/w_i": dot(5)}),
    "layer_stack": (
        lambda x: hk.layer_stack(3)(lambda x: jnp.tanh(hk.Linear(4)(x)))(x),
        (5, 4),
        {"linear/b": "broadcast_in_dim", "linear/w": dot(5)},
    ),
    "remat": (
        lambda x: hk.remat(lambda x: jnp.tanh(hk.Linear(4)(x)))(x),
        (5, 4),
        {"linear/b": "broadcast_in_dim", "linear/w": dot(5)},
    ),
}


@pytest.mark.parametrize("name", HAIKU)
def test_haiku(name):
    function, shape, expected = HAIKU[name]
    transformed = hk.without_apply_rng(hk.transform(function))
    parameters = filled(jax.eval_shape, lambda x: transformed.init(KEY, x[0]), rows(*shape))
    assert named(lambda p, x: score(transformed.apply(p, x)), parameters, rows(*shape)) == expected
