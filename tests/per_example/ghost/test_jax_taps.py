"""Gradients in factors are those of `jax.vmap(jax.grad)`, whatever way a loss uses its parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tapped_losses import agrees, places, run, uses

BATCH = 5


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape))


def rows(*shape, seed=1):
    return normal(BATCH, *shape, seed=seed)


def tokens(*shape, vocabulary=7):
    return jnp.asarray(np.random.default_rng(2).integers(0, vocabulary, size=(BATCH, *shape)))


def perceptron(p, x, y):
    h = jax.nn.gelu(x @ p["w"] + p["b"])
    return jnp.sum((jnp.tanh(h @ p["v"]) - y) ** 2)


def test_a_perceptron_has_one_term_for_each_position():
    p = {"w": normal(4, 6), "b": normal(6), "v": normal(6, 3)}
    assert uses(perceptron, p, rows(4), rows(3)) == ["add", [("dot_general", 1)], [("dot_general", 1)]]
    assert uses(perceptron, p, rows(7, 4), rows(3)) == ["add", [("dot_general", 7)], [("dot_general", 7)]]
    for x in (rows(4), rows(7, 4), rows(2, 3, 4)):
        agrees(perceptron, p, x, rows(3))


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


def test_products_of_two_parameters_are_uses_of_both():
    def loss(p, x):
        return jnp.sin(x @ (p["a"] @ p["b"])).sum()

    p = {"a": normal(6, 2), "b": normal(2, 3)}
    assert uses(loss, p, rows(4, 6)) == [[("dot_general", 3)], [("dot_general", 6)]]
    agrees(loss, p, rows(4, 6))


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


def tied(p, t):
    h = jnp.tanh(p["e"][t] @ p["w"])
    return -jax.nn.log_softmax(h @ p["e"].T)[jnp.arange(len(t)), t].mean()


def test_a_table_that_is_the_head_too_is_one_part():
    p, t = {"e": normal(7, 4), "w": normal(4, 4)}, tokens(6)
    assert uses(tied, p, t) == [[("embedding", 6), ("dot_general", 6)], [("dot_general", 6)]]
    (part,), _ = agrees(tied, p, t)
    assert [type(terms).__name__ for terms in part.terms] == ["Rows", "Dense"]
    assert part.place.shape == (1, 7, 4)


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


UNKNOWN = {
    "mul": lambda w, x: (x @ w).sum() + (w * 2).sum(),
    "add": lambda w, x: (x @ w).sum() + (x + w[0]).sum(),
    "sort": lambda w, x: x @ jnp.sort(w, 0),
    "rev": lambda w, x: x @ w[::-1],
    "cumsum": lambda w, x: x @ w + jnp.cumsum(w, 0)[:4],
    "reduce_sum": lambda w, x: x @ w + w.sum(),
    "while": lambda w, x: (
        lax.fori_loop(0, jnp.int32(x[0, 0] * 0) + 2, lambda i, c: c @ lax.stop_gradient(w), x)
        + jax.jvp(lambda w: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] @ w), (0, x))[1], (w,), (w,))[
            1
        ]
    ),
    "cond": lambda w, x: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x),
    "custom_jvp_call": lambda w, x: x @ jax.nn.relu(w),
    "reshape": lambda w, x: x[:, :4] @ w.T.reshape(4, 9),
    "dot_general of overlapping parts": lambda w, x: (x[:, :4] @ w[:4]) * (x[:, 2:] @ w[2:]),
    "slice": lambda w, x: x[:, :3] @ w[::2],
    "a parameter is the result": lambda w, x: w[1, 2],
}


@pytest.mark.parametrize("reason", UNKNOWN)
def test_a_parameter_with_an_unknown_use_falls_back_alone(reason):
    p, x = {"known": normal(6, 6), "w": normal(6, 6, seed=3)}, rows(4, 6)

    def loss(p, x):
        made = UNKNOWN[reason](p["w"], jnp.tanh(x @ p["known"]))
        return made.sum() if made.ndim else made

    known, unknown = uses(loss, p, x)
    assert unknown == reason
    assert known == ([] if reason.startswith("a parameter") else [("dot_general", 4)])
    if reason != "while":  # which has no derivative
        agrees(loss, p, x)


def test_what_the_value_does_not_depend_on_is_no_use():
    def loss(p, x):
        flags = jnp.argmax(p["w"], 1) + lax.stop_gradient(p["w"] ** 2).sum().astype(int)
        return (x @ p["w"]).sum() + (flags > 3).sum() * x.sum(), {"norm": jnp.exp(p["w"]), "w": p["w"]}

    w, x = normal(6, 6), rows(4, 6)
    assert uses(lambda *args: loss(*args)[0], {"w": w}, x) == [[("dot_general", 4)]]
    agrees(lambda *args: loss(*args)[0], {"w": w}, x)


def test_a_parameter_without_a_use_has_no_parts():
    p = {"idle": normal(3), "w": normal(4, 2)}
    idle, _ = agrees(lambda p, x: (x @ p["w"]).sum(), p, rows(4))
    assert list(idle) == []


def recurrent(p, x):
    def step(h, x):
        h = jnp.tanh(x @ p["w"] + h @ p["u"] + p["b"])
        return h, h @ p["v"]

    h, made = lax.scan(step, jnp.zeros(3), x)
    return (made**2).sum() + h.sum()


def test_a_constant_of_a_loop_has_a_term_for_each_step():
    p = {"w": normal(4, 3), "u": normal(3, 3), "b": normal(3), "v": normal(3, 2)}
    assert uses(recurrent, p, rows(6, 4)) == ["add", *[[("dot_general", 6)]] * 3]
    agrees(recurrent, p, rows(6, 4))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("unroll", [1, 2])
def test_a_loop_over_layers_gives_blocks(reverse, unroll):
    def loss(p, x):
        def layer(x, layer):
            w, e = layer
            return jnp.tanh(x @ w.T + p["all"] @ x), e @ x[0]

        x, made = lax.scan(layer, x, (p["w"], p["e"]), reverse=reverse, unroll=unroll)
        return (x**2).sum() + jnp.sin(made).sum()

    p = {"w": normal(4, 3, 3), "e": normal(4, 2, 3), "all": normal(5, 5)}
    assert uses(loss, p, rows(5, 3)) == [[("dot_general", 12)], [("dot_general", 1)], [("dot_general", 5)]]
    whole = ((0, 0, 0), (4, 3, 3))
    assert places(loss, p, rows(5, 3))[2] == [(whole, (4, 3, 3), (0,), (1,), (2,))]
    agrees(loss, p, rows(5, 3))


def test_loops_in_loops():
    """The outer loop goes over layers, the inner one over time; one matrix is used by all, another by each layer."""

    def loss(p, x):
        def layer(x, w):
            def step(h, x):
                return jnp.tanh(x @ p["u"] + w["h"] @ h), h @ w["o"]

            return lax.scan(step, jnp.zeros(3), x)[1] + x @ w["o"], None

        return (lax.scan(layer, x, p["layers"])[0] ** 2).sum()

    p = {"u": normal(3, 3), "layers": {"h": normal(2, 3, 3), "o": normal(2, 3, 3)}}
    found = uses(loss, p, rows(5, 3))
    assert found == [[("dot_general", 5)], [("dot_general", 5), ("dot_general", 5)], [("dot_general", 10)]]
    agrees(loss, p, rows(5, 3))


def test_lookups_in_loops():
    def loss(e, t):
        def step(h, t):
            return jnp.tanh(h * e[t] + e.at[t].get(mode="fill", fill_value=0)), None

        return lax.scan(step, jnp.ones(4), t)[0].sum()

    assert uses(loss, normal(7, 4), tokens(6)) == [[("embedding", 6), ("embedding", 6)]]
    agrees(loss, normal(7, 4), tokens(6))
    agrees(loss, normal(7, 4), tokens(6) * 3 - 6)


def test_a_parameter_that_a_loop_changes_falls_back_alone():
    def loss(p, x):
        def step(carry, x):
            h, w, same = carry
            return (jnp.tanh(x @ w + h @ same), w * 0.5, same), x @ p["u"]

        (h, _, same), made = lax.scan(step, (jnp.zeros(3), p["w"], p["s"]), x)
        return h.sum() + made.sum() + (x @ same).sum()

    p = {"s": normal(3, 3), "u": normal(3, 3), "w": normal(3, 3)}
    assert uses(loss, p, rows(6, 3)) == [[("dot_general", 6), ("dot_general", 6)], [("dot_general", 6)], "scan"]
    agrees(loss, p, rows(6, 3))


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
def test_checkpoints(policy):
    def loss(p, x):
        def layer(x, w):
            return jax.checkpoint(lambda x, w: jnp.tanh(jnp.sin(x @ w) @ p["u"]), policy=policy)(x, w), None

        x = jax.checkpoint(perceptron)(p["dense"], x, x[:, :3]) * x
        return (lax.scan(layer, x, p["w"])[0] ** 2).sum()

    p = {"w": normal(4, 3, 3), "u": normal(3, 3), "dense": {"w": normal(3, 5), "b": normal(5), "v": normal(5, 3)}}
    dense = ["add", [("dot_general", 6)], [("dot_general", 6)]]
    assert uses(loss, p, rows(6, 3)) == [*dense, [("dot_general", 24)], [("dot_general", 6)]]
    agrees(loss, p, rows(6, 3))


CONVOLUTIONS = {
    "plain": ((1, 8, 8, 3), (3, 3, 3, 4), {}),
    "strides": ((1, 9, 8, 3), (3, 2, 3, 4), {"window_strides": (2, 3)}),
    "same": ((1, 8, 8, 3), (3, 3, 3, 4), {"padding": "SAME"}),
    "cropped": ((1, 8, 8, 3), (2, 3, 3, 4), {"padding": [(-1, 2), (3, -2)]}),
    "dilated": ((1, 9, 9, 3), (2, 3, 3, 4), {"rhs_dilation": (3, 2)}),
    "transposed": ((1, 4, 5, 3), (3, 3, 3, 4), {"lhs_dilation": (2, 3), "padding": [(2, 1), (0, 3)]}),
    "groups": ((1, 6, 6, 6), (3, 3, 2, 9), {"feature_group_count": 3}),
    "depthwise": ((1, 6, 6, 6), (3, 3, 1, 6), {"feature_group_count": 6}),
    "several": ((2, 6, 5, 3), (3, 3, 3, 4), {"window_strides": (2, 1)}),
    "one position": ((1, 3, 3, 3), (3, 3, 3, 4), {}),
    "one element": ((1, 6, 6, 3), (1, 1, 3, 4), {}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name):
    shape, kernel, settings = CONVOLUTIONS[name]
    settings = {"window_strides": (1, 1), "padding": "VALID", **settings}

    def convolved(w, x):
        return lax.conv_general_dilated(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **settings)

    def loss(w, x):
        return jnp.sin(convolved(w, x)).sum()

    w, x = normal(*kernel), rows(*shape)
    positions = convolved(w, x[0])[..., 0].size
    assert uses(loss, w, x) == [[("conv_general_dilated", positions)]]
    agrees(loss, w, x)


@pytest.mark.parametrize("numbers", [("NCHW", "OIHW", "NCHW"), ("NHWC", "OHWI", "NCHW"), ("CNWH", "IHWO", "HNCW")])
def test_convolutions_of_any_layout_and_views_of_the_kernel(numbers):
    def loss(w, x):
        kernel = w.reshape(4, 3, 2, 3).transpose(*("OIHW".index(axis) for axis in numbers[1]))
        x = x.transpose(*("NCHW".index(axis) for axis in numbers[0]))
        return jnp.sin(lax.conv_general_dilated(x, kernel, (1, 2), "SAME", dimension_numbers=numbers)).sum()

    w, x = normal(4, 18), rows(1, 3, 6, 5)
    assert uses(loss, w, x) == [[("conv_general_dilated", 18)]]
    assert places(loss, w, x)[0] == [(((0, 0), (4, 18)), (4, 18), (), (0,), (1,))]
    agrees(loss, w, x)


def test_convolutions_in_loops():
    def loss(p, x):
        def layer(x, w):
            return jnp.tanh(jnp.convolve(x, p["all"], "same") + jnp.convolve(x, w, "same")), None

        return lax.scan(layer, x, p["w"])[0].sum()

    p = {"all": normal(3), "w": normal(4, 3)}
    assert uses(loss, p, rows(6)) == ["rev", "rev"]

    def unturned(p, x):
        def layer(x, w):
            both = [lax.conv(x[None, None], k[None, None], (1,), "SAME")[0, 0] for k in (p["all"], w)]
            return jnp.tanh(sum(both)), None

        return lax.scan(layer, x, p["w"])[0].sum()

    assert uses(unturned, p, rows(6)) == [[("conv_general_dilated", 24)], [("conv_general_dilated", 6)]]
    agrees(unturned, p, rows(6))


def test_what_the_kernel_does_not_meet_stays_out_of_the_patches():
    """A NaN in the image is in the patches of the positions that see it, and in no others."""
    x = rows(1, 6, 6, 1).at[2, 0, 0, 0, 0].set(jnp.nan)

    def loss(w, x):
        return lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")).sum()

    gradient = run(loss, (None, 0), [True])(normal(3, 3, 1, 2), x).gradients[0]
    left = np.isnan(np.asarray(gradient[0].terms[0].left))
    assert left.sum(axis=(1, 2, 3)).tolist() == [0, 0, 1, 0, 0]
