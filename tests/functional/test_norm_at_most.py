"""The exact check of a norm, beside fractions."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip
from frameworks import ALL, by_name
from gradclip import clip_by_global_norm, norm_at_most
from rational import at_most, power_of_norm, random_leaf, random_threshold

EAGER = [framework for framework in ALL if not framework.jit]
eagerly = pytest.mark.parametrize("framework", EAGER, ids=by_name)


@eagerly
@pytest.mark.parametrize("ord", [1, 2, 3, 64, math.inf, -math.inf])
def test_random_trees_beside_fractions(framework, ord):
    rng = np.random.default_rng([len(framework.name), 7])
    outcomes = []
    with framework.mode():
        for _ in range(60):
            kinds = rng.choice(framework.dtypes, size=2)
            if ord != 2 and any("complex" in kind for kind in kinds):
                continue
            leaves = [random_leaf(rng, kind, int(rng.integers(1, 12))) for kind in kinds]
            if not all(np.isfinite(leaf.astype(complex)).all() for leaf in leaves):
                continue
            threshold = random_threshold(rng, leaves, abs(ord))
            if ord == -math.inf:
                smallest = float(power_of_norm(leaves, ord))
                threshold = smallest if len(outcomes) % 2 else float(np.nextafter(smallest, 0)) * (smallest > 0)
            tree = {"a": framework.from_numpy(leaves[0]), "b": [framework.from_numpy(leaves[1]), None]}
            outcomes.append(at_most(leaves, ord, threshold))
            assert norm_at_most(tree, threshold, ord=ord) == outcomes[-1], (leaves, threshold)
    assert {True, False} <= set(outcomes)


@pytest.mark.parametrize("framework", [f for f in EAGER if "float32" in f.dtypes], ids=by_name)
def test_beyond_the_precision_of_float32(framework):
    assert norm_at_most(framework.array([3.0, 4.0]), 5)
    assert norm_at_most(framework.array([3.0, 4.0]), framework.array(5.0))
    assert not norm_at_most(framework.array([1.0, 1e-5]), 1)
    assert not norm_at_most({"w": framework.array([1.0]), "b": framework.array([1e-30])}, 1.0, ord=1)
    assert not norm_at_most(framework.array([1.0, 1e-30]), framework.array(1.0), ord=3)
    assert norm_at_most(framework.array(np.full(10_000, 0.5), "bfloat16"), 50.0)
    assert not norm_at_most(framework.array(np.full(10_001, 0.5), "float16"), 50.0)


@eagerly
@pytest.mark.parametrize("ord", [1, 2, math.inf, -math.inf])
def test_what_is_not_finite(framework, ord):
    for bad in (np.nan, np.inf, -np.inf):
        tree = framework.array([1.0, bad], framework.dtypes[0])
        assert not norm_at_most(tree, 1e300, ord=ord)
        assert norm_at_most(tree, math.inf, ord=ord) == (not math.isnan(bad))
    assert not norm_at_most(framework.array([np.inf, np.nan], framework.dtypes[0]), math.inf, ord=ord)


@eagerly
def test_complex_numbers(framework):
    kind = framework.dtypes[-1]
    for ord in (2, math.inf, -math.inf):
        assert norm_at_most(framework.array([3 + 4j], kind), 5, ord=ord)
        assert not norm_at_most(framework.array([3 + 4j], kind), np.nextafter(5.0, 0), ord=ord)
    with pytest.raises(ValueError, match=r"ord=1 of complex numbers\. Use 2, inf or -inf"):
        norm_at_most(framework.array([3 + 4j], kind), 5, ord=1)


def test_beyond_the_range_of_float64():
    huge, tiny = np.full(4, 1e308), np.full(4, 5e-324)
    assert not norm_at_most(huge, 1.7e308)
    assert norm_at_most(huge, math.inf)
    assert norm_at_most(huge, 1e308, ord=math.inf)
    assert norm_at_most(tiny, 1e-323)
    assert not norm_at_most(tiny, 5e-324)
    assert not norm_at_most(np.array([1e308, 1e-300]), 1e308, ord=3)


def test_empty_trees_and_zeros():
    for tree in ({}, None, np.zeros(0), [np.zeros((0, 3)), np.zeros(2)], torch.zeros(3), jnp.zeros(3)):
        assert norm_at_most(tree, 0)
        assert norm_at_most(tree, math.inf, ord=-math.inf)
    assert not norm_at_most(np.array([5e-324]), 0)


def test_thresholds_are_not_rounded():
    assert not norm_at_most(np.array([0.1]), Fraction(1, 10))
    assert norm_at_most(np.array([0.1]), 0.1)
    assert not norm_at_most(np.array([2.0**53 + 4]), 2**53 + 3)
    assert not norm_at_most(np.array([2.0**53 + 4]), np.int64(2**53 + 3))
    assert norm_at_most(np.array([0.1], np.float32), np.float32(0.1))
    assert not norm_at_most(np.array([0.1], np.float32), 0.1)


def test_integers_do_not_count():
    for array in (np.array, torch.tensor, jnp.array):
        assert norm_at_most([array([16_777_216.0]), array([1])], 16_777_216)
        with pytest.raises(TypeError, match="holds no floating-point numbers"):
            norm_at_most(array([16_777_217]), 16_777_217)


def test_files_are_loaded_first(tmp_path):
    path = tmp_path / "update.npz"
    np.savez(path, w=np.array([3.0, 4.0]), steps=np.array(100))
    for given in (path, str(path), bytes(path), {"update": path}):
        with pytest.raises(TypeError, match=r"Load the arrays of a file first: dict\(numpy\.load\(path, .* for \.npz"):
            norm_at_most(given, 5)
    with path.open("rb") as file, pytest.raises(TypeError, match="Load the arrays of a file first"):
        norm_at_most(file, 5)
    with np.load(path, allow_pickle=False) as opened:
        with pytest.raises(
            TypeError, match=r"of type NpzFile with 2 entries at the root\. Convert it with dict\(\.\.\.\)"
        ):
            norm_at_most(opened, 5)
        assert norm_at_most(dict(opened), 5)
    assert norm_at_most(dict(np.load(path, allow_pickle=False)), 5)


def test_layouts_and_sparse_tensors():
    x = np.arange(24.0).reshape(2, 3, 4)
    norm = math.isqrt(4324)
    assert power_of_norm([x], 2) == 4324
    views = (x.T, x[::-1], torch.tensor(x).transpose(0, 2), torch.tensor(x).to_sparse(), jnp.asarray(x, jnp.float32).T)
    for view in views:
        assert not norm_at_most(view, norm)
        assert norm_at_most(view, norm + 1)
    conjugate = torch.tensor([3 + 4j]).conj()
    assert norm_at_most(conjugate, 5)
    assert norm_at_most(torch.nn.Parameter(torch.tensor([3.0, 4.0])), 5)


def test_an_array_over_several_devices_would_be_copied():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    assert norm_at_most(jax.device_put(jnp.array([3.0, 4.0]), sharding), 5)


def test_what_was_clipped_passes():
    rng = np.random.default_rng(0)
    for dtype in (np.float16, np.float32, np.float64):
        for _ in range(50):
            clipped, _ = clip_by_global_norm(rng.normal(size=7).astype(dtype), 0.7)
            assert norm_at_most(clipped, 0.7)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: norm_at_most(np.ones(2), 1, ord=1.5), ValueError, "cannot decide exactly for ord=1.5."),
        (lambda: norm_at_most(np.ones(2), 1, ord=1025), ValueError, "ord=1025"),
        (lambda: norm_at_most(np.ones(2), -1), ValueError, "must not be negative or NaN, got -1"),
        (lambda: norm_at_most(np.ones(2), math.nan), ValueError, "must not be negative or NaN"),
        (lambda: norm_at_most(np.ones(2), "1"), TypeError, "max_norm must be a real number"),
        (lambda: norm_at_most(torch.ones(2), torch.ones(2)), TypeError, "max_norm must be a real number"),
        (lambda: norm_at_most({"w": np.array([True])}, 1), TypeError, r"\['w'\] has dtype bool\. If these"),
        (lambda: norm_at_most(["a"], 1), TypeError, "a leaf of gradients must be an array"),
        (lambda: norm_at_most([np.ones(1), torch.ones(1)], 1), TypeError, "arrays of one framework"),
        (lambda: jax.jit(lambda x: norm_at_most(x, 1.0))(jnp.ones(2)), ValueError, "a traced call does not have"),
        (lambda: jax.jit(lambda c: norm_at_most(np.ones(2), c))(1.0), ValueError, "a traced call does not have"),
        (lambda: torch.func.vmap(lambda x: norm_at_most(x, 1.0))(torch.ones(2, 2)), ValueError, "a traced call"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("leaf", "error", "message"),
    [
        (torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), TypeError, "a nested tensor cannot be"),
        (torch.ones(2).to(torch.float8_e4m3fn), TypeError, "has dtype float8_e4m3fn, which cannot be clipped"),
        (torch.ones(2, device="meta"), ValueError, "on the meta device holds no values"),
        (jax.random.key(0), TypeError, "has dtype key<fry>, which cannot be clipped"),
    ],
)
def test_exact_checks_refuse_what_holds_no_numbers(leaf, error, message):
    with pytest.raises(error, match=message):
        gradclip.norm_at_most(leaf, 1.0)
