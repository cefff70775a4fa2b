"""Parameters that are moved, cut and joined before they are used."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tapped_losses import agrees, normal, places, rows, uses


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


SQUARE = {
    "W.T": lambda w, x: x @ w.T,
    "W then W.T": lambda w, x: jnp.tanh(x @ w) @ w.T,
    "W twice": lambda w, x: jnp.tanh(x @ w) @ w,
    "W @ W": lambda w, x: x @ (w @ w),
    "W.T @ W": lambda w, x: x @ (w.T @ w),
    "W on two inputs": lambda w, x: (x @ w) * (jnp.flip(x, 0) @ w),
    "halves": lambda w, x: (x[:, :3] @ w[:3]) * (x[:, 3:] @ w[3:]),
    "columns, exchanged": lambda w, x: jnp.concatenate([x @ w[:, 4:], x @ w[:, :4]], 1),
    "quarters": lambda w, x: x[:, :3] @ w[:3, 3:] + (x[:, 3:] @ w[3:, :3]) ** 2,
    "one row": lambda w, x: x @ w[2],
    "columns of a reshape": lambda w, x: x @ w.reshape(6, 2, 3)[:, 1],
    "a column": lambda w, x: x @ w[:, 2:3],
    "an axis of length 1": lambda w, x: x @ jnp.squeeze(w[None, :, None].swapaxes(1, 3), (0, 2)),
    "joined": lambda w, x: x @ jnp.concatenate([w[:, 3:], jnp.ones((6, 2)), w[:, :3]], 1),
    "joined along the sum": lambda w, x: jnp.tile(x, 2)[:, :9] @ jnp.concatenate([w[4:], jnp.ones((3, 6)), w[:4]], 0),
    "blocks": lambda w, x: jnp.einsum("thd,hdk->thk", x.reshape(-1, 2, 3), w.reshape(2, 3, 6)),
    "jit": lambda w, x: jax.jit(lambda v, x: jax.jit(jnp.matmul)(x, v))(w.T, x) + jax.jit(jnp.matmul)(x, w),
    "a constant number of a row": lambda w, x: x @ w[jnp.int32(1)] + x @ lax.dynamic_index_in_dim(w, -2, 0, False),
}


@pytest.mark.parametrize("name", SQUARE)
def test_views_are_told_apart(name):
    """Square matrices, so that a confusion of rows with columns would go unnoticed by shapes."""
    w, x = normal(6, 6), rows(4, 6)

    def loss(p, x):
        return (SQUARE[name](p["w"], x) ** 2).mean()

    assert isinstance(uses(loss, {"w": w}, x)[0], list), uses(loss, {"w": w}, x)
    agrees(loss, {"w": w}, x)


def attention(p, x, after):
    if after:
        q, k, v = jnp.split(x @ p["qkv"], 3, -1)
    else:
        q, k, v = (x @ w for w in jnp.split(p["qkv"], 3, -1))
    weights = jax.nn.softmax(q @ k.T / 2.0)
    return ((weights @ v @ p["out"]) ** 2).sum()


def test_fused_projections_split_before_or_after():
    p, x = {"qkv": normal(4, 12), "out": normal(4, 4)}, rows(3, 4)
    whole, parts = ((lambda p, x, after=after: attention(p, x, after)) for after in (True, False))
    assert uses(whole, p, x) == [[("dot_general", 3)], [("dot_general", 3)]]
    assert uses(parts, p, x) == [[("dot_general", 3)], [("dot_general", 3)] * 3]
    boxes = [((0, 0), (4, 4)), ((0, 4), (4, 8)), ((0, 8), (4, 12))]
    assert places(parts, p, x)[1] == [(box, (4, 4), (), (0,), (1,)) for box in boxes]
    for one, terms in ((whole, 1), (parts, 3)):
        assert len(agrees(one, p, x)[1]) == terms
