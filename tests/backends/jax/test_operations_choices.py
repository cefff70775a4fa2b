"""A choice between two computations: in eager and traced code, with nothing compiled again."""

import jax
import jax.numpy as jnp
import pytest

from compilations import compiled_in
from gradclip._src.backends.jax.operations import either

X = jnp.arange(3.0)


def chosen(flags, x):
    return either(flags, lambda: x * 2, lambda: x + 1)


@pytest.mark.parametrize("wrapped", [lambda f: f, jax.jit, jax.disable_jit()(jax.jit)])
def test_any_flag_counts(wrapped):
    call = wrapped(chosen)
    assert call(jnp.array([False, True]), X).tolist() == [0.0, 2.0, 4.0]
    assert call(jnp.array([False, False]), X).tolist() == [1.0, 2.0, 3.0]
    assert call(jnp.array(True), X).tolist() == [0.0, 2.0, 4.0]


def test_flags_that_do_not_depend_on_traced_values():
    assert jax.jit(lambda x: chosen(jnp.array([True]), x))(X).tolist() == [0.0, 2.0, 4.0]
    assert jax.vmap(lambda x: chosen(x > 1, x))(X).tolist() == [1.0, 2.0, 4.0]


def test_only_the_chosen_one_runs_and_nothing_is_compiled_again():
    ran = []
    for name in ("a", "b", "a", "b"):
        flag = jnp.array([name == "a"])
        made = compiled_in(lambda flag=flag: either(flag, lambda: ran.append("a") or X, lambda: ran.append("b") or X))
    assert ran == ["a", "b", "a", "b"]
    assert made == 0
