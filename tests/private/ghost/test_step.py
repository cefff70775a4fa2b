"""Whole calls with gradients in factors: every setting gives what it gives with gradients that are made."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import gradclip

WIDTH, COUNT, STEPS = 64, 10, 3
RNG = np.random.default_rng(0)
PARAMS = {
    "w": RNG.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8,
    "b": RNG.standard_normal(WIDTH).astype(np.float32),
    "out": {"v": RNG.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8},
}
X = RNG.standard_normal((COUNT, STEPS, WIDTH)).astype(np.float32) * np.geomspace(0.1, 10, COUNT)[:, None, None].astype(
    "f"
)
Y = RNG.standard_normal((COUNT, WIDTH)).astype(np.float32)
MASK = np.array([True, False] + [True] * (COUNT - 3) + [False])


def loss_of(tanh):
    def loss(params, x, y):
        h = tanh(x @ params["w"] + params["b"])
        return (((h @ params["out"]["v"]).sum(-2) - y) ** 2).mean()

    return loss


LOSSES = {"jax": loss_of(jnp.tanh), "torch": loss_of(torch.tanh)}
ARRAYS = {"jax": jnp.asarray, "torch": torch.tensor}


def arguments(framework):
    make = ARRAYS[framework]
    params = {"w": make(PARAMS["w"]), "b": make(PARAMS["b"]), "out": {"v": make(PARAMS["out"]["v"])}}
    return params, make(X), make(Y)


def leaves(tree):
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]


def both(framework, loss=None, args=None, mask=None, **settings):
    """Return the results by factors and by gradients that are made."""
    found = []
    for method in ("ghost", "materialize"):
        given = {"batch_argnums": (1, 2), "method": method} | settings
        clipped = gradclip.clipped_grad(loss or LOSSES[framework], **given)
        # Eagerly JAX compiles each operation of gradients that are made.
        if framework == "jax" and method == "materialize":
            clipped = jax.jit(clipped)
        found.append(clipped(*(args or arguments(framework)), mask=mask))
    return found


def check_alike(one, other):
    for x, y in zip(leaves(one), leaves(other), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5 * max(1e-30, np.abs(y).max(initial=0)))


SETTINGS = {
    "plain": {},
    "padded": {"pad_to": 13},
    "microbatches": {"microbatch_size": 4},
    "microbatches of bytes": {"microbatch_size": "100 KiB", "pad_to": 10},
    "one at a time": {"microbatch_size": 1},
    "without the batch axis": {"keep_batch_dim": False},
    "per layer": {"per_layer": True},
    "per layer by size": {"per_layer": True, "uniform": False},
    "a tree of thresholds": {"max_norm": {"w": 0.5, "b": 0.1, "out": 2.0}},
    "normalize": {"rule": "normalize"},
    "automatic": {"rule": "automatic", "gamma": 0.1},
    "to unit": {"to_unit": True},
    "a mean": {"normalize_by": 8.0},
    "outputs": {"return_values": True, "return_norms": True},
    "outputs of microbatches": {"return_values": True, "return_norms": True, "microbatch_size": 3},
    "norms of a tree": {"max_norm": {"w": 0.5, "b": 0.1, "out": 2.0}, "return_norms": True},
    "raise": {"nonfinite": "raise"},
    "propagate": {"nonfinite": "propagate"},
}


# These set the weights of examples, and the last step of a call. Neither asks whether there is a mask.
ALIKE_WITH_A_MASK = [
    "without the batch axis",
    "per layer",
    "per layer by size",
    "a tree of thresholds",
    "normalize",
    "automatic",
    "to unit",
    "a mean",
]
OTHERS = [name for name in SETTINGS if name not in ALIKE_WITH_A_MASK]


@cache
def by_gradients(name, masked):
    """Return the results by gradients that are made, in PyTorch, which compiles nothing."""
    settings = {"max_norm": 1.0, "batch_argnums": (1, 2), "method": "materialize"} | SETTINGS[name]
    return gradclip.clipped_grad(LOSSES["torch"], **settings)(*arguments("torch"), mask=MASK if masked else None)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "masked"), [*((name, True) for name in SETTINGS), *((name, False) for name in OTHERS)]
)
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_every_setting(framework, name, masked):
    settings = {"max_norm": 1.0, "batch_argnums": (1, 2), "method": "ghost"} | SETTINGS[name]
    clipped = gradclip.clipped_grad(LOSSES[framework], **settings)
    check_alike(clipped(*arguments(framework), mask=MASK if masked else None), by_gradients(name, masked))


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_float64_sums(framework):
    with jax.enable_x64(True):
        made, other = both(framework, max_norm=1.0, sum_dtype="float64")
        assert {str(x.dtype).rpartition(".")[2] for x in jax.tree.leaves(made)} == {"float64"}
        check_alike(made, other)


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_auxiliary_results(framework):
    def loss(params, x, y):
        value = LOSSES[framework](params, x, y)
        return value, {"twice": 2 * value, "first": x[..., 0]}

    check_alike(*both(framework, loss, max_norm=1.0, has_aux=True, return_values=True, mask=MASK))


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_several_arguments(framework):
    def loss(w, x, y, rest):
        return LOSSES[framework]({"w": w, **rest}, x, y)

    params, x, y = arguments(framework)
    rest = {"b": params["b"], "out": params["out"]}
    made, other = both(framework, loss, (params["w"], x, y, rest), max_norm=1.0, argnums=(3, 0))
    assert isinstance(made, tuple)
    check_alike(made, other)


def test_keys():
    def loss(params, x, y, key):
        return LOSSES["jax"](params, x * jax.random.bernoulli(key, 0.5, x.shape), y)

    args = (*arguments("jax"), jax.random.key(3))
    settings = {"max_norm": 1.0, "batch_argnums": (1, 2), "prng_argnum": 3}
    expected = jax.jit(gradclip.clipped_grad(loss, method="materialize", **settings))(*args)
    for size in (None, 3):
        check_alike(gradclip.clipped_grad(loss, method="ghost", microbatch_size=size, **settings)(*args), expected)


@pytest.mark.parametrize("call", ["jit", "vmap", "scan"])
def test_in_traced_code(call):
    params, *batch = arguments("jax")
    batches = [x.reshape(2, 5, *x.shape[1:]) for x in (X, Y)]
    clipped, expected = (
        gradclip.clipped_grad(LOSSES[framework], 1.0, batch_argnums=(1, 2), method=method)
        for framework, method in (("jax", "ghost"), ("torch", "materialize"))
    )
    if call == "jit":
        check_alike(jax.jit(clipped)(params, *batch), expected(*arguments("torch")))
        return
    found = {
        "vmap": jax.jit(jax.vmap(clipped, (None, 0, 0))),
        "scan": lambda params, *batches: jax.lax.map(lambda batch: clipped(params, *batch), batches),
    }[call](params, *batches)
    for i in range(2):
        of_batch = expected(arguments("torch")[0], *(torch.tensor(x[i]) for x in batches))
        check_alike(jax.tree.map(lambda x, i=i: np.asarray(x)[i], found), of_batch)


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_keyword_arguments_and_an_empty_batch(framework):
    def loss(params, x, y, *, times):
        return LOSSES[framework](params, x, y) * times

    params, x, y = arguments(framework)
    found = [
        gradclip.clipped_grad(loss, 1.0, batch_argnums=(1, 2), method=method)(params, x, y, times=3.0)
        for method in ("ghost", "materialize")
    ]
    check_alike(*found)
    auto = gradclip.clipped_grad(loss, 1.0, batch_argnums=(1, 2))
    assert not any(x.any() for x in leaves(auto(params, x[:0], y[:0], times=3.0)))


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_an_example_that_is_not_finite(framework, broken):
    params, x, y = arguments(framework)
    wrong = X.copy()
    wrong[2, 0, 0] = broken
    mask = np.arange(COUNT) != 2
    clipped = gradclip.clipped_grad(LOSSES[framework], 1.0, batch_argnums=(1, 2), method="ghost", pad_to=COUNT)
    found, without = clipped(params, ARRAYS[framework](wrong), y), clipped(params, x, y, mask=mask)
    assert all((a == b).all() and np.isfinite(a).all() for a, b in zip(leaves(found), leaves(without), strict=True))


def test_complex_parameters_are_made():
    params = {"w": torch.ones(64, 64, dtype=torch.complex64)}
    batch = torch.ones(2, 64)
    loss = lambda p, x: (x.to(torch.complex64) @ p["w"]).abs().sum()
    clipped = gradclip.clipped_grad(loss, 1.0)
    assert clipped.plan(params, batch).leaves[0].why == "parameters have dtype complex64"
    with pytest.raises(ValueError, match="not possible here: parameters have dtype complex64"):
        gradclip.clipped_grad(loss, 1.0, method="ghost")(params, batch)


def test_a_function_that_uses_a_parameter_more_often_than_planned_rounds_more():
    times = [1.0]
    clipped = gradclip.clipped_grad(
        lambda w, x: sum(((x * k) @ w).square().sum() for k in times),
        1.0,
        method="ghost",
        pad_to=8,
        keep_batch_dim=False,
    )
    w, x = torch.ones(WIDTH, WIDTH), torch.ones(8, WIDTH)
    clipped(w, x)
    few = clipped.sensitivity().rounding
    times.append(2.0)
    with pytest.warns(RuntimeWarning, match="Call sensitivity"):
        clipped(w, x)
    assert clipped.sensitivity().rounding > few


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_plans_of_fake_tensors_say_so_and_are_not_kept(device):
    clipped = gradclip.clipped_grad(lambda w, x: torch.sin(x @ w).sum(), 1.0)
    with FakeTensorMode():
        (leaf,) = clipped.plan(torch.empty(300, 300, device=device), torch.empty(20, 300, device=device)).leaves
    assert (leaf.how, leaf.why) == ("autograd", "the tensors are fake")
    assert clipped.plan(torch.ones(300, 300), torch.ones(20, 300)).ghost


@pytest.mark.parametrize("around", ["torch.compile", "torch.func.vmap"])
def test_plans_are_kept_apart_from_where_nothing_can_be_tapped(around):
    clipped = gradclip.clipped_grad(lambda w, x: torch.sin(x @ w).sum(), 1.0)
    w, x = torch.linspace(-1, 1, 300**2).reshape(300, 300), torch.linspace(-1, 2, 6000).reshape(20, 300)
    plain = clipped(w, x)
    for _ in range(2):
        assert clipped.plan(w, x).ghost
        if around == "torch.compile":
            found = torch.compile(clipped, backend="eager")(w, x)
        else:
            found = torch.func.vmap(lambda x: clipped(w, x))(x[None])[0]
        check_alike(found, plain)


def test_ghost_refuses_to_be_compiled():
    clipped = gradclip.clipped_grad(LOSSES["torch"], 1.0, batch_argnums=(1, 2), method="ghost")
    clipped(*arguments("torch"))
    with pytest.raises(ValueError, match=r"not possible here: torch\.compile traces the call"):
        torch.compile(clipped, backend="eager")(*arguments("torch"))


def carried(parameter, x):
    """Add a table of positions within a loop."""
    if isinstance(x, torch.Tensor):
        return x + parameter["table"]
    return jax.lax.scan(lambda c, given: (c, given[0] + given[1]), x[0, 0], (x, parameter["table"]))[1]


ADDED = {
    "added": lambda p, x: x + p["table"],
    "subtracted": lambda p, x: p["table"][None] - x,
    "in a loop": carried,
    "most of it": lambda p, x: x[:150] + p["table"][:150],
}
NOT_ADDED = {
    "a part": lambda p, x: x[:50] + p["table"][:50],
    "to a parameter": lambda p, x: x @ (p["w"] + p["table"]),
    "to a number": lambda p, x: x @ (p["table"] + 1.0),
    "multiplied, then added": lambda p, x: (x * p["table"]).sum() + (x + p["table"]),
    "added, then multiplied": lambda p, x: (x + p["table"]) * p["table"],
    "in a product too": lambda p, x: (x + p["table"]) @ p["table"],
}


def with_a_table(framework, use):
    """Return what `clipped_grad` gets: a loss that uses a large table of positions, and its arguments."""
    rng, make = np.random.default_rng(3), ARRAYS[framework]
    params = {name: make(rng.standard_normal((256, 256)).astype(np.float32) / 16) for name in ("table", "w")}
    return (
        lambda p, x: ((use(p, x) @ p["w"]) ** 2).mean(),
        (params, make(rng.standard_normal((3, 256, 256)).astype(np.float32))),
    )


@pytest.mark.parametrize("use", ADDED)
@pytest.mark.parametrize("framework", ARRAYS)
def test_ghost_makes_the_gradients_of_a_table_that_is_only_added(framework, use):
    loss, args = with_a_table(framework, ADDED[use])
    settings = {"batch_argnums": (1,), "keep_batch_dim": False, "max_norm": 1.0}
    check_alike(*both(framework, loss, args, **settings))
    plan = gradclip.clipped_grad(loss, method="ghost", **settings).plan(*args)
    assert [leaf.how for leaf in plan.leaves] == ["autograd", "ghost"]


@pytest.mark.parametrize("use", NOT_ADDED)
@pytest.mark.parametrize("framework", ARRAYS)
def test_ghost_insists_on_factors_where_made_gradients_are_large(framework, use):
    loss, args = with_a_table(framework, NOT_ADDED[use])
    clipped = gradclip.clipped_grad(loss, 1.0, method="ghost", keep_batch_dim=False)
    with pytest.raises(ValueError, match=r"cannot measure \['table'\] of shape \(256, 256\) without making"):
        clipped.plan(*args)


@pytest.mark.parametrize("framework", ARRAYS)
def test_parameters_without_elements_beside_factors(framework):
    make = ARRAYS[framework]
    params = {"empty": make(PARAMS["w"][:0]), "w": make(PARAMS["w"])}
    loss = lambda p, x: (x @ p["w"]).sum() + p["empty"].sum()
    check_alike(*both(framework, loss, (params, make(X)), batch_argnums=(1,), max_norm=1.0))
