"""Which parameters can be tapped, and why others cannot."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tapped_losses import agrees, normal, rows, uses


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


UNKNOWN = {
    "mul": lambda w, x: (x @ w).sum() + (w * 2).sum(),
    "add": lambda w, x: (x @ w).sum() + (x + w[0]).sum(),
    "sort": lambda w, x: x @ jnp.sort(w, 0),
    "rev": lambda w, x: x @ w[::-1],
    "cumsum": lambda w, x: x @ w + jnp.cumsum(w, 0)[:4],
    "reduce_sum": lambda w, x: x @ w + w.sum(),
    "while": lambda w, x: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] @ w), (0, x))[1],
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
