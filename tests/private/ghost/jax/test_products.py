"""Products of matrices and lookups: their outer products sum to the gradients of `jax.vmap(jax.grad)`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tapped import per_example
from tapped_losses import BATCH, agrees, normal, rows, run, scored, tokens, uses


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(
    ("pattern", "shape"),
    [
        ("td,df->tf", (4, 6)),
        ("td,fd->tf", (6, 4)),
        ("td,dhk->thk", (4, 2, 3)),
        ("td,hdk->thk", (2, 4, 3)),
        ("td,hkd->htk", (3, 2, 4)),
        ("td,t->d", (5,)),
        ("td,td->", (5, 4)),
        ("td,tdf->tf", (5, 4, 3)),
        ("td,dtf->tf", (4, 5, 3)),
        ("td,ftd->f", (3, 5, 4)),
        ("td,f->tdf", (3,)),
        ("td,->td", ()),
    ],
)
@pytest.mark.parametrize("first", [False, True])
def test_products_of_any_dimensions(pattern, shape, first):
    """The parameter is the left or right operand, with blocks, several rows or columns, or none."""
    inputs, result = pattern.split("->")
    x, w = inputs.split(",")
    turned = f"{w},{x}->{result}" if first else pattern

    def loss(p, x):
        return jnp.sin(jnp.einsum(turned, *((p, x) if first else (x, p)))).sum()

    found = uses(loss, normal(*shape), rows(5, 4))
    if pattern != "td,->td":
        assert found[0][0][0] == "dot_general"
    agrees(loss, normal(*shape), rows(5, 4))


def test_products_of_two_parameters_are_uses_of_both():
    def loss(p, x):
        return jnp.sin(x @ (p["a"] @ p["b"])).sum()

    p = {"a": normal(6, 2), "b": normal(2, 3)}
    assert uses(loss, p, rows(4, 6)) == [[("dot_general", 3)], [("dot_general", 6)]]
    agrees(loss, p, rows(4, 6))


LOOKUPS = {
    "index": lambda e, t: e[t],
    "take": lambda e, t: jnp.take(e, t, axis=0),
    "take, clipped": lambda e, t: jnp.take(e, t, axis=0, mode="clip"),
    "take, wrapped": lambda e, t: jnp.take(e, t, axis=0, mode="wrap"),
    "filled": lambda e, t: e.at[t].get(mode="fill", fill_value=0),
    "negative": lambda e, t: e[-1 - t],
    "columns": lambda e, t: e[:, t % 4],
    "of a transpose": lambda e, t: e.T[:, t],
    "of a part": lambda e, t: e[2:6][t % 4],
    "of a reshape": lambda e, t: e.reshape(14, 2)[t],
    "bytes": lambda e, t: e[t.astype(jnp.uint8)],
    "one": lambda e, t: e[t[0]],
    "one at a time": lambda e, t: jax.vmap(lambda i: e[i])(t),
    "windows": lambda e, t: jax.vmap(lambda i: lax.dynamic_slice_in_dim(e, i, 3))(t),
    "a window": lambda e, t: lax.dynamic_slice_in_dim(e, t[0], 3),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups(name):
    e, t = normal(7, 4), tokens(6)

    def loss(p, t):
        return jnp.sin(LOOKUPS[name](p, t)).sum()

    (found,) = uses(loss, e, t)
    assert found == [("embedding", {"one": 1, "a window": 3, "windows": 18}.get(name, 6))]
    agrees(loss, e, t)


@pytest.mark.parametrize("name", ["index", "take, clipped", "filled", "bytes", "a window", "windows"])
def test_lookups_outside_the_table(name):
    t = jnp.asarray([[0, 7, 3], [6, 8, 250], [1, 1, 0], [-1, -8, 2], [-20, 5, 7]])
    t = jnp.clip(t, 0) if name == "bytes" else t

    def loss(p, t):
        return jnp.sin(LOOKUPS[name](p, t)).sum()

    agrees(loss, normal(7, 4), t)


def test_a_table_that_is_the_head_too_is_one_part():
    p, t = {"e": normal(7, 4), "w": normal(4, 4)}, tokens(6)
    assert uses(tied, p, t) == [[("embedding", 6), ("dot_general", 6)], [("dot_general", 6)]]
    (part,), _ = agrees(tied, p, t)
    assert [type(terms).__name__ for terms in part.terms] == ["Embedding", "Dense"]
    assert part.place.shape == (1, 7, 4)


def tied(p, t):
    h = jnp.tanh(p["e"][t] @ p["w"])
    return -jax.nn.log_softmax(h @ p["e"].T)[jnp.arange(len(t)), t].mean()


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("wider", [False, True])
def test_factors_keep_their_dtypes(kind, wider):
    """Small integers, so that all products and sums are exact: the gradient of row i is (1 + i) x_i."""

    def loss(w, x):
        made = jnp.matmul(x, w.astype(kind), preferred_element_type=jnp.float32 if wider else None)
        return (made * jnp.arange(1, 4, dtype=made.dtype)).sum()

    w, x = jnp.ones((4, 3), jnp.float32), jnp.arange(BATCH * 4).reshape(BATCH, 4).astype(kind)
    (part,) = run(scored(loss), (None, 0), [True])(w, x).gradients[0]
    (terms,) = part.terms

    assert (terms.left.dtype, terms.right.dtype) == (kind, "float32" if wider else kind)
    found = per_example([part], (4, 3), BATCH)
    np.testing.assert_array_equal(found, np.arange(BATCH * 4.0).reshape(BATCH, 4, 1) * [1, 2, 3])
