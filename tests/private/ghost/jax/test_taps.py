"""`JaxTaps` gives the values, outputs and gradients of `jax.vmap(jax.value_and_grad)`, wherever it runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from gradclip._src.private.ghost.jax.taps import JaxTaps
from gradclip._src.private.ghost.records import Made
from tapped import per_example
from tapped_losses import (
    BATCH,
    TAPS,
    agrees,
    beside,
    close,
    found,
    normal,
    perceptron,
    perceptron_parameters,
    places,
    quickly,
    rows,
    run,
    scored,
    tokens,
    uses,
)


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def test_a_perceptron_has_one_term_for_each_position():
    p = perceptron_parameters()
    assert uses(perceptron, p, rows(4), rows(3)) == ["add", [("dot_general", 1)], [("dot_general", 1)]]
    assert uses(perceptron, p, rows(7, 4), rows(3)) == ["add", [("dot_general", 7)], [("dot_general", 7)]]
    assert places(perceptron, p, rows(4), rows(3))[2] == [(((0, 0), (4, 6)), (4, 6), (), (0,), (1,))]
    for x in (rows(4), rows(7, 4), rows(2, 3, 4)):
        agrees(perceptron, p, x, rows(3))


def test_leaves_are_described():
    p = {"deep": [jnp.ones((2, 3), jnp.bfloat16), {"b": np.ones(3)}], "idle": 2.0}

    def loss(p, x, scale):
        return ((x.astype(jnp.bfloat16) @ p["deep"][0] + p["deep"][1]["b"]) * scale["by"]).sum()

    named = TAPS.uses(scored(loss), (0, 2), (p, rows(2), {"by": np.float32(2)}), (None, 0, None))
    assert [(one.path, one.shape, one.dtype) for one in named] == [
        ("[0]['deep'][0]", (2, 3), "bfloat16"),
        ("[0]['deep'][1]['b']", (3,), "float64"),
        ("[0]['idle']", (), "float64"),
        ("[1]['by']", (), "float32"),
    ]
    assert [one.reason for one in named] == ["", "add", "", "mul"]
    assert [one.path for one in found(lambda p, x: (x @ p).sum(), normal(2), rows(2))] == [""]


def test_nothing_is_computed_to_find_uses():
    def loss(p, x):
        jax.debug.callback(lambda: pytest.fail("the loss ran"))
        return (x @ p).sum()

    p, x = jax.ShapeDtypeStruct((4, 3), jnp.float32), jax.ShapeDtypeStruct((BATCH, 4), jnp.float32)
    assert uses(loss, p, x) == [[("dot_general", 1)]]


def scored_with_outputs(p, x, key, kwargs):
    keep = jax.random.bernoulli(key, 0.5, (6,))
    h = jax.nn.relu(x @ p["w"]) * keep / kwargs["rate"]
    assert kwargs["name"] == "a text"
    return jnp.sum((h @ p["v"] + p["b"]) ** 2), {"h": h, "all": p["w"], "kept": keep.sum(), "none": None}


def with_outputs():
    p = {"b": normal(3), "v": normal(6, 3), "w": normal(4, 6)}
    return p, rows(4), jax.random.split(jax.random.key(0), BATCH), {"rate": 0.5, "name": "a text"}


def test_values_and_outputs_are_those_of_the_loss():
    (*args, kwargs), axes = with_outputs(), (None, 0, 0, None)

    def other(*args):
        usual = [
            jax.vmap(of_one, axes) for of_one in (scored_with_outputs, jax.grad(scored_with_outputs, has_aux=True))
        ]
        return [of_batch(*args) for of_batch in usual]

    both = beside(other, scored_with_outputs, axes, [False, True, True], rest=(kwargs,))
    ran, ((values, aux), (expected, _)) = both(*args)
    np.testing.assert_array_equal(ran.values, values)
    assert jax.tree.structure(ran.aux) == jax.tree.structure(aux)
    for x, y in zip(jax.tree.leaves(ran.aux), jax.tree.leaves(aux), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
    for gradient, whole in zip(ran.gradients, jax.tree.leaves(expected), strict=True):
        close(per_example(gradient, whole.shape[1:], BATCH), whole)


def test_a_negative_zero_stays_negative():
    found = TAPS.run(scored(lambda w, x: 1 / (x @ w)), 0, (jnp.ones(1), -jnp.zeros((2, 1))), (None, 0), [True])
    assert found.values.tolist() == [-np.inf, -np.inf]


def test_several_arguments_are_differentiated():
    def loss(w, x, v):
        return jnp.sum((jnp.tanh(x @ w["w"]) @ v) ** 2)

    args, axes = ({"w": normal(4, 6), "idle": normal(2)}, rows(2, 4), rows(6, 3, seed=4)), (None, 0, 0)
    usual = jax.vmap(jax.grad(loss, (0, 2)), axes)
    ran, expected = beside(usual, scored(loss), axes, [True, True, True], (0, 2))(*args)
    assert list(ran.gradients[0]) == []
    for gradient, whole in zip(ran.gradients[1:], (expected[0]["w"], expected[1]), strict=True):
        close(per_example(gradient, whole.shape[1:], BATCH), whole)


def test_parameters_are_made_where_they_are_to_be():
    p, x, y, axes = perceptron_parameters(), rows(7, 4), rows(3), (None, 0, 0)
    usual = jax.vmap(jax.grad(perceptron), axes)
    for flags in ([False, False, True], [False, True, False], [False, False, False]):
        ran, expected = beside(usual, scored(perceptron), axes, flags)(p, x, y)
        assert [not isinstance(one, Made) for one in ran.gradients] == flags
        for gradient, whole in zip(ran.gradients, jax.tree.leaves(expected), strict=True):
            close(per_example(gradient, whole.shape[1:], BATCH), whole)


def test_parameters_that_cannot_come_in_parts_are_made():
    p, x, y, axes = perceptron_parameters(), rows(7, 4), rows(3), (None, 0, 0)
    usual = jax.vmap(jax.grad(perceptron), axes)
    ran, whole = beside(usual, scored(perceptron), axes, [True, True, True])(p, x, y)
    assert ran.untapped == {0: "add"}
    assert [isinstance(one, Made) for one in ran.gradients] == [True, False, False]
    close(per_example(ran.gradients[0], (6,), BATCH), whole["b"])


def test_a_loss_that_reads_values_is_left_alone():
    def loss(p, x):
        return (x @ p).sum() if p[0, 0] > 0 else x.sum()

    p, x = jnp.abs(normal(4, 3)), rows(4)
    (named,) = found(loss, p, x)
    assert (named.reason, named.uses) == ("the function reads values while it is traced", ())
    ran = TAPS.run(scored(loss), 0, (p, x), (None, 0), [True])
    assert ran.untapped == {0: named.reason}
    np.testing.assert_array_equal(ran.gradients[0].rows, np.repeat(np.asarray(x)[:, :, None], 3, 2))


@pytest.mark.parametrize("kind", ["complex128", "int32", "float8_e4m3fn"])
def test_parameters_of_other_dtypes_are_not_tapped(kind):
    def loss(p, x):
        return (x @ p["w"]).sum() + jnp.abs(x @ p["z"].astype(complex)).sum()

    p = {"w": normal(4, 3), "z": normal(4, 3).astype(kind)}
    assert uses(loss, p, rows(4)) == [[("dot_general", 1)], f"{kind} parameter"]


def test_products_of_other_dtypes_are_not_tapped():
    assert uses(lambda p, x: jnp.abs((x + 1j) @ p).sum(), normal(4, 3), rows(4)) == ["dot_general"]


def test_errors_are_those_of_jax():
    with pytest.raises(TypeError, match="Gradient only defined for scalar-output functions"):
        TAPS.run(lambda p, x: (x @ p, ()), 0, (normal(4, 3), rows(4)), (None, 0), [True])
    with pytest.raises(TypeError, match="grad requires real- or complex-valued inputs"):
        TAPS.run(lambda p, x: ((x * p).sum(), ()), 0, (jnp.ones(4, int), rows(4)), (None, 0), [True])


def outer(gradients):
    """Return the gradient of each example, from `Dense` terms of whole matrices."""
    return [sum(jnp.einsum("bgtr,bgtc->brc", *terms) for terms in one[0].terms) for one in gradients]


def dense(p, x):
    return ((jnp.tanh(x @ p["w"]) @ p["w"]) @ p["v"]).sum() ** 2


def gradients_of(p, x):
    ran = JaxTaps().run(scored(dense), 0, (p, x), (None, 0), [True, True])
    return outer(ran.gradients), ran.values


def expected_of(p, x):
    values, gradients = jax.vmap(jax.value_and_grad(dense), (None, 0))(p, x)
    return [gradients["v"], gradients["w"]], values


def same(found, expected):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        close(np.asarray(x), y)


WHERE = {
    "eagerly": lambda function: function,
    "compiled": jax.jit,
    "in a loop": lambda function: (
        lambda p, x: jax.tree.map(
            lambda made: made.reshape(-1, *made.shape[2:]),
            lax.map(lambda x: function(p, x), x.reshape(2, 3, *x.shape[1:])),
        )
    ),
    "mapped": lambda function: jax.vmap(function, ({"v": None, "w": 0}, None)),
    "mapped over rows": lambda function: jax.vmap(function, (None, 1)),
    "forward derivatives": jax.jacfwd,
    "backward derivatives": jax.jacrev,
    "derivatives by the rows": lambda function: jax.jacrev(function, 1),
}


@pytest.mark.parametrize("name", WHERE)
def test_it_runs_in_transformations(name):
    """Above all, derivatives of the result are right, though parameters are constants within."""
    p, x = {"v": normal(4, 2), "w": normal(4, 4)}, normal(6, 2, 4)
    w = np.asarray(p["w"])
    p["w"] = np.stack([w, 2 * w]) if name == "mapped" else p["w"]
    x = np.stack([x, 2 * np.asarray(x)], 1) if name == "mapped over rows" else x
    compiled = quickly if name != "eagerly" else lambda function: function
    same(compiled(WHERE[name](gradients_of))(p, x), quickly(WHERE[name](expected_of))(p, x))


def test_microbatches_in_a_loop_with_a_changing_carry():
    p, x = {"v": normal(4, 2), "w": normal(4, 4)}, normal(6, 2, 4)

    def add(i, total):
        made, _ = gradients_of(p, lax.dynamic_slice_in_dim(x, 2 * i, 2))
        return [a + b.sum(0) for a, b in zip(total, made, strict=True)]

    total = lax.fori_loop(0, 3, add, [jnp.zeros((4, 2)), jnp.zeros((4, 4))])
    same(total, [np.asarray(whole).sum(0) for whole in quickly(expected_of)(p, x)[0]])


def test_examples_do_not_meet():
    """An example of NaN leaves the others as they were, to the bit."""
    p, x, y, i = {**perceptron_parameters(), "e": normal(7, 4)}, rows(6, 4), rows(3), tokens(6)

    def loss(p, x, y, i):
        return perceptron(p, x + p["e"][i], y)

    ran = run(scored(loss), (None, 0, 0, 0), [False, True, True, True])
    broken = np.array(x)
    broken[2] = np.nan
    clean, spoiled = ran(p, x, y, i), ran(p, broken, y, i)
    kept = np.asarray([0, 1, 3, 4])
    for before, after in zip(jax.tree.leaves(clean[:2]), jax.tree.leaves(spoiled[:2]), strict=True):
        before, after = (x.rows if isinstance(x, Made) else x for x in (before, after))
        before = before if hasattr(before, "shape") else before.terms
        after = after if hasattr(after, "shape") else after.terms
        for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            np.testing.assert_array_equal(np.asarray(a)[kept], np.asarray(b)[kept])
    assert np.isnan(np.asarray(spoiled.values)[2])


def test_taps_cost_neither_products_nor_memory():
    """Each layer takes one product forward, and all but the first one backward. No product makes a gradient."""
    p = {"v": jnp.ones((256, 10), jnp.float32), "w": jnp.ones((784, 256), jnp.float32)}
    x = jnp.ones((64, 784), jnp.float32)

    def loss(p, x):
        return jax.nn.logsumexp(jax.nn.relu(x @ p["w"]) @ p["v"])

    def made(p, x):
        ran = TAPS.run(scored(loss), 0, (p, x), (None, 0), [True, True])
        return [part.terms for one in ran.gradients for part in one]

    compiled = jax.jit(made).lower(p, x).compile()
    products = 2 * 64 * (784 * 256 + 2 * 256 * 10)
    assert products <= compiled.cost_analysis()["flops"] <= 1.01 * products
    assert compiled.memory_analysis().temp_size_in_bytes <= 64 * 4 * (784 + 4 * 256)
