"""Dtypes and norms of the value of one example, and what is left out of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradclip.integrations._jax_privacy_values import cast, left_out_together, norms_of, widened

FLOAT0 = np.zeros(3, jax.dtypes.float0)


@pytest.mark.parametrize(
    ("given", "dtype", "expected"),
    [
        ("float16", None, "float16"),
        ("float16", "float32", "float32"),
        ("float32", "float16", "float32"),
        ("bfloat16", "float16", "float32"),
    ],
)
@pytest.mark.parametrize("has_aux", [False, True])
def test_values_become_at_least_as_wide(given, dtype, expected, has_aux):
    fun = lambda x: ({"x": x, "n": FLOAT0}, x) if has_aux else {"x": x, "n": FLOAT0}
    made = widened(fun, dtype, has_aux)(jnp.ones(2, given))
    value = made[0] if has_aux else made
    assert value["x"].dtype == expected
    assert value["n"] is FLOAT0
    assert not has_aux or made[1].dtype == given


def test_a_result_becomes_narrower():
    assert cast(jnp.ones(2), jnp.float16).dtype == jnp.float16
    assert cast(FLOAT0, jnp.float16) is FLOAT0


TREE = {"a": jnp.array([3.0, 4.0]), "b": {"c": jnp.array([5]), "d": jnp.array([12.0])}, "n": FLOAT0}


@pytest.mark.parametrize("call", [norms_of, jax.jit(norms_of, static_argnums=1)], ids=["eager", "jit"])
def test_norms_of_all_and_of_parts(call):
    assert float(call({name: TREE[name] for name in "ab"}, 1.0)) == pytest.approx(np.sqrt(25 + 25 + 144), rel=1e-7)


def test_norms_of_parts():
    found = norms_of(TREE, {"a": 1.0, "b": 2.0, "n": 3.0})
    assert jax.tree.map(float, found) == {"a": 5.0, "b": 13.0, "n": 0.0}
    found = norms_of(TREE, {"a": 1.0, "b": {"c": 1.0, "d": 1.0}, "n": 1.0})
    assert jax.tree.map(float, found) == {"a": 5.0, "b": {"c": 5.0, "d": 12.0}, "n": 0.0}
    with pytest.raises(ValueError, match="a prefix of the tree"):
        norms_of(TREE, {"a": 1.0})


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_part_that_is_not_finite_leaves_out_all(bad):
    fun = lambda x: ({"a": x, "b": jnp.ones(2), "n": FLOAT0}, "aux")
    whole = left_out_together(fun, True, {"a": 1.0, "b": 1.0, "n": 1.0})
    value, (aux, norms) = whole(jnp.array([3.0, bad]))
    assert [x.tolist() for x in (value["a"], value["b"])] == [[0.0, 0.0], [0.0, 0.0]]
    assert (value["n"] is FLOAT0, aux, float(norms["b"])) == (True, "aux", pytest.approx(np.sqrt(2)))
    assert not np.isfinite(norms["a"])
    value, _ = whole(jnp.array([3.0, 1e38]))  # finite, though its square is not
    assert value["a"].tolist() == [3.0, np.float32(1e38)]
