"""`clip_pytree` of `jax_privacy.clipping`: every row of its table, untraced and traced, and its switches."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import jax_privacy.clipping
import numpy as np
import pytest

from gradclip.integrations.jax_privacy import clip_pytree
from parity_support import REQUIRED, arguments, assert_just_below

# Norm 13.
TREE = {"w": jnp.array([3.0, 4.0]), "b": (jnp.array([[12.0]]), None)}
ZEROS = {"w": [0.0, 0.0], "b": [[0.0]]}
UNCHANGED = {"w": [3.0, 4.0], "b": [[12.0]]}
UNIT = {"w": [3 / 13, 4 / 13], "b": [[12 / 13]]}


def untraced(tree, clip_norm, rescale=False, nan_safe=True, return_zero=False):
    return clip_pytree(tree, clip_norm, rescale, nan_safe, return_zero)


@jax.jit(static_argnames=("rescale", "nan_safe"))
def traced(tree, clip_norm, rescale=False, nan_safe=True, return_zero=False):
    return clip_pytree(tree, clip_norm, rescale, nan_safe, return_zero)


both_ways = pytest.mark.parametrize("clip", [untraced, traced])
both_scales = pytest.mark.parametrize("rescale", [False, True])


def times(factor):
    return {"w": [3 * factor, 4 * factor], "b": [[12 * factor]]}


def matches(tree, expected, dtype="float32"):
    assert_just_below(tree["w"], expected["w"], dtype)
    assert_just_below(tree["b"][0], expected["b"], dtype)
    return tree["b"][1] is None


def equals(tree, expected):
    return tree["w"].tolist() == expected["w"] and tree["b"][0].tolist() == expected["b"]


def test_signature():
    assert arguments(clip_pytree) == [
        ("pytree", REQUIRED),
        ("clip_norm", REQUIRED),
        ("rescale_to_unit_norm", False),
        ("nan_safe", True),
        ("return_zero", False),
    ]


@both_ways
@pytest.mark.parametrize(
    ("clip_norm", "rescale", "expected"),
    [
        (0.0, False, ZEROS),
        (0.0, True, UNIT),
        (math.inf, False, UNCHANGED),
        (math.inf, True, ZEROS),
        (1.0, False, UNIT),
        (1.0, True, UNIT),
        (6.5, False, times(0.5)),
        (6.5, True, UNIT),
        (26.0, False, UNCHANGED),
        (26.0, True, times(1 / 26)),
        (2, False, times(2 / 13)),
    ],
)
def test_table(clip, clip_norm, rescale, expected):
    clipped, norm = clip(TREE, clip_norm, rescale)
    assert matches(clipped, expected)
    assert (float(norm), norm.dtype, norm.shape) == (13.0, jnp.float32, ())


@both_ways
@pytest.mark.parametrize(("clip_norm", "rescale", "expected"), [(0.0, False, ZEROS), (math.inf, True, ZEROS)])
def test_zeros_of_the_table_are_exact(clip, clip_norm, rescale, expected):
    assert equals(clip(TREE, clip_norm, rescale)[0], expected)


@both_ways
@pytest.mark.parametrize("clip_norm", [26.0, math.inf])
def test_unchanged_of_the_table_is_exact(clip, clip_norm):
    assert equals(clip(TREE, clip_norm)[0], UNCHANGED)


def test_norm_at_the_threshold_is_decided_exactly():
    assert equals(clip_pytree(TREE, 13.0)[0], UNCHANGED)


@both_scales
@pytest.mark.parametrize("clip_norm", [-1.0, -1, -math.inf, np.float32(-1.0), jnp.array(-1.0), math.nan], ids=repr)
def test_known_negative_and_nan_thresholds(clip_norm, rescale):
    with pytest.raises(ValueError, match="must not be negative or NaN"):
        clip_pytree(TREE, clip_norm, rescale)


@both_scales
def test_traced_negative_threshold_gives_zeros(rescale):
    clipped, norm = traced(TREE, -1.0, rescale)
    assert equals(clipped, ZEROS)
    assert float(norm) == 13.0


@both_ways
@both_scales
@pytest.mark.parametrize("clip_norm", [0.0, 1.0, math.inf])
def test_norm_zero_is_unchanged(clip, rescale, clip_norm):
    clipped, norm = clip({"w": jnp.zeros(2)}, clip_norm, rescale)
    assert clipped["w"].tolist() == [0.0, 0.0]
    assert float(norm) == 0.0


@both_ways
def test_threshold_of_each_leaf(clip):
    clipped, norms = clip(TREE, {"w": 2.5, "b": (24.0, None)})
    assert matches(clipped, {"w": [1.5, 2.0], "b": [[12.0]]})
    assert jax.tree.map(float, norms) == {"w": 5.0, "b": (12.0, None)}
    assert norms["w"].dtype == jnp.float32


@both_ways
def test_threshold_of_a_subtree_is_shared_by_its_leaves(clip):
    clipped, norms = clip({"layer": TREE, "scale": jnp.array([2.0])}, {"layer": 6.5, "scale": 4.0})
    assert matches(clipped["layer"], times(0.5))
    assert clipped["scale"].tolist() == [2.0]
    assert jax.tree.map(float, norms) == {"layer": 13.0, "scale": 2.0}


@both_ways
def test_thresholds_with_unit_norm(clip):
    clipped, _ = clip(TREE, {"w": 0.0, "b": (24.0, None)}, True)
    assert matches(clipped, {"w": [0.6, 0.8], "b": [[0.5]]})
    clipped, _ = clip(TREE, {"w": math.inf, "b": (0.0, None)}, True)
    assert matches(clipped, {"w": [0.0, 0.0], "b": [[1.0]]})


@pytest.mark.parametrize("exponent", [-120, -149])
def test_a_tiny_gradient_may_become_a_unit_vector(exponent):
    # The coefficient of the second is beyond float32.
    (clipped,), _ = untraced([jnp.array(np.ldexp(np.float32([3, 4]), exponent))], 0.0, True)
    found = sum(Fraction(float(x)) ** 2 for x in clipped)
    assert found <= 1 <= found * Fraction(1.0001)


def test_negative_threshold_in_a_tree():
    thresholds = {"w": -1.0, "b": (24.0, None)}
    with pytest.raises(ValueError, match=r"must not be negative or NaN, got -1\.0"):
        clip_pytree(TREE, thresholds)
    clipped, _ = traced(TREE, thresholds)
    assert equals(clipped, {"w": [0.0, 0.0], "b": [[12.0]]})


@pytest.mark.parametrize(
    "thresholds",
    [{"w": 1.0}, {"w": {"x": 1.0}, "b": 1.0}, {"w": 1.0, "b": None}, [1.0, 1.0], {"w": 1.0, "b": 1.0, "c": 1.0}],
    ids=["missing", "deeper", "none", "list", "too many"],
)
def test_thresholds_that_are_no_prefix(thresholds):
    with pytest.raises(ValueError, match="one number or a prefix of the tree"):
        clip_pytree(TREE, thresholds)


@pytest.mark.parametrize("clip_norm", [jnp.array([1.0]), None, "1.0"], ids=["vector", "none", "string"])
def test_thresholds_that_are_no_numbers(clip_norm):
    with pytest.raises((TypeError, ValueError), match=r"threshold|max_norm|clip_norm"):
        clip_pytree(TREE, clip_norm)


@both_ways
@both_scales
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_safe_counts_nonfinite_elements_as_zero(clip, rescale, bad):
    tree = [jnp.array([3.0, bad]), jnp.array([4.0])]
    clipped, norm = clip(tree, 1.0, rescale)
    assert_just_below(clipped[0], [0.6, 0.0], "float32")
    assert_just_below(clipped[1], [0.8], "float32")
    assert float(norm) == 5.0
    unclipped, _ = clip(tree, math.inf)
    assert [leaf.tolist() for leaf in unclipped] == [[3.0, 0.0], [4.0]]


@both_ways
@pytest.mark.parametrize("clip_norm", [1.0, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_without_nan_safe_nonfinite_elements_are_seen_everywhere(clip, clip_norm, bad):
    clipped, norm = clip([jnp.array([3.0, bad]), jnp.array([4.0])], clip_norm, False, False)
    assert all(np.isnan(leaf).all() for leaf in clipped)
    assert np.isnan(norm) if math.isnan(bad) else norm == math.inf


@both_ways
@pytest.mark.parametrize("nan_safe", [True, False])
def test_layers_do_not_see_each_others_nan(clip, nan_safe):
    clipped, norms = clip(
        {"a": jnp.array([6.0, math.nan]), "b": jnp.array([4.0])}, {"a": 3.0, "b": 2.0}, False, nan_safe
    )
    assert_just_below(clipped["b"], [2.0], "float32")
    assert float(norms["b"]) == 4.0
    if nan_safe:
        assert_just_below(clipped["a"], [3.0, 0.0], "float32")
    else:
        assert np.isnan(clipped["a"]).all()


@pytest.mark.parametrize("switch", [True, np.True_, jnp.array(True)], ids=["python", "numpy", "jax"])
@pytest.mark.parametrize("nan_safe", [True, False])
def test_return_zero(switch, nan_safe):
    tree = {"w": jnp.array([3.0, math.nan]), "b": (jnp.array([[4.0]]), None)}
    assert equals(clip_pytree(tree, 1.0, nan_safe=nan_safe, return_zero=switch)[0], ZEROS)
    assert equals(traced(tree, 1.0, False, nan_safe, switch)[0], ZEROS)


@pytest.mark.parametrize("switch", [False, np.False_, jnp.array(False)], ids=["python", "numpy", "jax"])
def test_return_zero_switched_off(switch):
    assert matches(clip_pytree(TREE, 6.5, return_zero=switch)[0], times(0.5))
    assert matches(traced(TREE, 6.5, return_zero=switch)[0], times(0.5))


def test_return_zero_over_a_batch_with_padding():
    batch = {"w": jnp.array([[3.0, 4.0], [math.nan, 1.0], [0.375, 0.5]])}

    def clip(example, is_padding):
        return clip_pytree(example, 1.0, nan_safe=False, return_zero=is_padding)

    clipped, norms = jax.jit(jax.vmap(clip))(batch, jnp.array([False, True, False]))
    assert_just_below(clipped["w"], [[0.6, 0.8], [0.0, 0.0], [0.375, 0.5]], "float32")
    assert norms.shape == (3,)
    assert_just_below(norms[::2], [5.0, 0.625], "float32")


@both_ways
@both_scales
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_dtypes_are_kept_and_the_norm_is_float32(clip, rescale, dtype):
    tree = (jnp.array([3 * 2**13], dtype), jnp.array(4 * 2**13, dtype))
    clipped, norm = clip(tree, 1.0, rescale)
    assert [leaf.dtype for leaf in clipped] == [dtype] * 2
    one = 1 + 0j if dtype == "complex64" else 1.0
    assert_just_below(clipped[0], [0.6 * one], dtype)
    assert_just_below(clipped[1], 0.8 * one, dtype)
    assert (float(norm), norm.dtype) == (5 * 2**13, jnp.float32)


@both_ways
def test_float64_leaves_with_a_float32_norm(clip):
    with jax.enable_x64(True):
        clipped, norm = clip(jnp.array([3.0, 4.0]), 1.0)
        assert clipped.dtype == jnp.float64
        assert_just_below(clipped, [0.6, 0.8], "float64")
        assert (norm.dtype, float(norm)) == (jnp.float32, 5.0)


@both_ways
def test_empty_trees(clip):
    clipped, norm = clip({}, 1.0)
    assert clipped == {}
    assert (float(norm), norm.dtype) == (0.0, jnp.float32)
    assert clip({}, {}) == ({}, {})


@pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")
@pytest.mark.parametrize("clip", [untraced, traced])
def test_integers_count_and_keep_their_dtype(clip):
    """As in jax-privacy, where the coefficient too becomes an integer, zero. Rounding toward zero keeps the bound."""
    tree = {"w": jnp.array([3.0]), "n": jnp.array([40, -30])}
    clipped, norm = clip(tree, 10.0)
    expected, known = jax_privacy.clipping.clip_pytree(tree, 10.0)
    assert clipped["n"].dtype == expected["n"].dtype == jnp.int32
    assert clipped["n"].tolist() == [7, -5]
    np.testing.assert_allclose([norm, *clipped["w"]], [known, *expected["w"]], rtol=1e-6)
