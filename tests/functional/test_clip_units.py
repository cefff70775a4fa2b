"""Clipping by units: each has its own norm, threshold and policy, and none exceeds its bound in exact arithmetic."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental.sparse import BCOO
from torch._subclasses.fake_tensor import FakeTensorMode

import gradclip
from frameworks import ALL, by_name, numpy_dtype
from rational import power_of_norm

SHAPES = ((), (5,), (4, 3), (3, 4, 2), (2, 3, 4, 5), (1, 6), (2, 1, 3, 2, 2))


def own_axes(framework, shape):
    """Where units lie by the table of `clip_by_unit_norm`, written out for the shapes above."""
    if framework.name.startswith(("torch", "mlx")):
        return () if len(shape) < 2 else (0,)
    return {(): (), (5,): (), (4, 3): (1,), (3, 4, 2): (1, 2), (2, 3, 4, 5): (3,), (1, 6): (), (2, 1, 3, 2, 2): (4,)}[
        shape
    ]


def units(array, own):
    """The places of units, and what lies there."""
    for at in np.ndindex(*[array.shape[axis] for axis in own]):
        yield at, array[tuple(at[own.index(axis)] if axis in own else slice(None) for axis in range(array.ndim))]


def drawn(rng, shape, dtype):
    """Numbers whose units are of many sizes, some of them zeros."""
    sizes = rng.choice(
        [0.0, 1e-4, 0.03, 1.0, 30.0], size=[n if i in (0, len(shape) - 1) else 1 for i, n in enumerate(shape)]
    )
    x = rng.normal(size=shape) + (1j * rng.normal(size=shape) if "complex" in dtype else 0.0)
    return np.asarray(x * sizes).astype(numpy_dtype(dtype))


@pytest.mark.parametrize("framework", ALL, ids=by_name)
def test_each_unit_by_hand(framework):
    dtype = framework.dtypes[-1]
    x = framework.array([[3.0, 0.3], [4.0, 0.4]], dtype)
    (clipped, norms) = framework.call(lambda x: gradclip.clip_by_unit_norm(x, 1.0, unit_axis=-1), x)
    assert np.allclose(framework.to_numpy(clipped), [[0.6, 0.3], [0.8, 0.4]], rtol=1e-6)
    assert np.allclose(framework.to_numpy(norms), [5.0, 0.5], rtol=1e-6)
    assert framework.to_numpy(clipped)[:, 1].tobytes() == framework.to_numpy(x)[:, 1].tobytes()
    norms = framework.call(lambda x: gradclip.clip_by_unit_norm(x, 1.0)[1], x)
    rows = framework.name.startswith(("torch", "mlx"))
    assert np.allclose(
        framework.to_numpy(norms), [math.sqrt(9.09), math.sqrt(16.16)] if rows else [5.0, 0.5], rtol=1e-6
    )


def shapes_for(framework, dtype, turn=0):
    """Return the shapes to try: where each is compiled for every order, half of them, the other half at the next."""
    half = framework.jit and "complex" not in dtype
    return SHAPES[(turn + framework.dtypes.index(dtype)) % 2 :: 2] if half else SHAPES


ORDERS = (1, 2, 3, math.inf)


@pytest.mark.parametrize("framework", ALL, ids=by_name)
@pytest.mark.parametrize("ord", ORDERS)
def test_no_unit_exceeds_its_threshold(framework, ord):
    rng = np.random.default_rng([7, len(framework.name)])
    call = lambda tree: gradclip.clip_by_unit_norm(tree, 0.7, ord=ord)
    for dtype in framework.dtypes:
        if "complex" in dtype and ord != 2:
            continue
        shapes = shapes_for(framework, dtype, ORDERS.index(ord))
        given = {str(shape): drawn(rng, shape, dtype) for shape in shapes}
        clipped, norms = framework.call(call, {key: framework.array(x, dtype) for key, x in given.items()})
        limit = Fraction(0.7) if math.isinf(ord) else Fraction(0.7) ** ord
        for key, x in given.items():
            own, y, found = own_axes(framework, x.shape), *map(framework.to_numpy, (clipped[key], norms[key]))
            assert (y.dtype, y.shape) == (x.dtype, x.shape)
            assert found.shape == tuple(x.shape[axis] for axis in own)
            for (at, before), (_, after) in zip(units(x, own), units(y, own), strict=True):
                exact, bounded = (power_of_norm([unit], ord) for unit in (before, after))
                assert bounded <= limit
                if exact <= limit * (1 - Fraction(1, 10**6)) or (exact <= limit and not framework.traced):
                    assert before.tobytes() == after.tobytes()
                if exact > limit:
                    assert bounded >= limit * Fraction(0.97 if "16" in dtype else 1 - 1e-5) ** 3
                root = float(exact) if math.isinf(ord) else float(exact) ** (1 / ord)
                assert float(found[at]) == pytest.approx(root, rel=2e-6)


@pytest.mark.parametrize("framework", ALL, ids=by_name)
def test_no_unit_exceeds_what_follows_from_its_parameter(framework):
    rng = np.random.default_rng([8, len(framework.name)])
    clipping, eps, some = 0.3, 1e-3, 0
    for dtype in framework.dtypes:
        shapes = shapes_for(framework, dtype)
        given, params = ({str(shape): drawn(rng, shape, dtype) for shape in shapes} for _ in range(2))
        trees = [{key: framework.array(x, dtype) for key, x in tree.items()} for tree in (given, params)]
        clipped, _ = framework.call(
            lambda tree, params: gradclip.adaptive_grad_clip(tree, params, clipping=clipping, eps=eps), *trees
        )
        for key, x in given.items():
            own, y = own_axes(framework, x.shape), framework.to_numpy(clipped[key])
            for (_, before), (_, after), (_, weight) in zip(
                units(x, own), units(y, own), units(params[key], own), strict=True
            ):
                limit = Fraction(clipping) ** 2 * max(power_of_norm([weight], 2), Fraction(eps) ** 2)
                exact, bounded = (power_of_norm([unit], 2) for unit in (before, after))
                assert bounded <= limit
                if exact <= limit * (1 - Fraction(1, 10**6)):
                    assert before.tobytes() == after.tobytes()
                if exact > limit and (dtype != "float16" or limit > 1e-4):
                    assert bounded >= limit * Fraction(0.97 if "16" in dtype else 1 - 1e-5) ** 2
                some += exact > limit
    assert some > 10


def test_units_at_their_threshold_stay():
    x = np.array([[3.0, 4.0], [6.0, 8.0], [5.0, 12.0]], np.float32)
    for make, read in ((np.asarray, np.asarray), (torch.tensor, torch.Tensor.numpy), (jnp.asarray, np.asarray)):
        clipped, _ = gradclip.clip_by_unit_norm(make(x), 5.0, unit_axis=0)
        assert read(clipped)[0].tolist() == [3.0, 4.0]
        clipped, _ = gradclip.clip_by_unit_norm(make(x * 3), 39.0, unit_axis=0, nonfinite="zero")
        assert read(clipped)[2].tolist() == [15.0, 36.0]


@pytest.mark.parametrize("framework", ALL, ids=by_name)
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("propagate", [[math.nan, math.nan], [0.6, 0.8]]),
        ("zero", [[0.0, 1.0], [0.6, 0.8]]),
        ("drop", [[0.0, 0.0], [0.6, 0.8]]),
    ],
)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_policies_are_those_of_a_unit(framework, adaptive, policy, expected, bad):
    dtype = framework.dtypes[-1]
    x, w = framework.array([[bad, 4.0], [3.0, 4.0]], dtype), framework.array([[6.0, 8.0], [6.0, 8.0]], dtype)

    def call(x, w):
        if adaptive:
            return gradclip.adaptive_grad_clip(x, w, clipping=0.1, unit_axis=0, nonfinite=policy)[0]
        return gradclip.clip_by_unit_norm(x, 1.0, unit_axis=0, nonfinite=policy)[0]

    found = framework.to_numpy(framework.call(call, x, w))
    assert np.allclose(found.real, expected, rtol=1e-6, equal_nan=True)


@pytest.mark.after_error
def test_raise_names_the_leaf_and_leaves_all_as_it_was():
    tree = {"a": np.ones((2, 2)), "b": np.array([[1.0, np.nan]] * 2)}
    with pytest.raises(FloatingPointError, match=r"\['b'\]: 2 NaN"):
        gradclip.clip_by_unit_norm(tree, 0.1, nonfinite="raise")
    assert (tree["a"] == 1.0).all()
    with pytest.raises(ValueError, match="nonfinite='raise' needs the values"):
        jax.jit(lambda tree: gradclip.clip_by_unit_norm(tree, 0.1, nonfinite="raise"))(tree)


@pytest.mark.parametrize("framework", ALL, ids=by_name)
def test_parameters_that_are_not_ordinary(framework):
    dtype = framework.dtypes[-1]
    x = framework.array([[3.0, 4.0]] * 4, dtype)
    w = framework.array([[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0], [3e37, 4e37]], dtype)
    call = lambda x, w, **eps: gradclip.adaptive_grad_clip(x, w, clipping=0.5, **eps, unit_axis=0)[0]
    found = framework.to_numpy(framework.call(call, x, w))
    assert np.allclose(found[0], [3e-4, 4e-4], rtol=1e-5)
    assert np.isnan(found[1]).all()
    assert found[2:].tolist() == [[3.0, 4.0]] * 2
    found = framework.to_numpy(framework.call(lambda x, w: call(x, w, eps=0.0), x, w))
    assert found[0].tolist() == [0.0, 0.0]
    large = framework.call(lambda x, w: gradclip.adaptive_grad_clip(x, w, clipping=math.inf, eps=0.0)[0], x, w)
    assert framework.to_numpy(large).tolist() == [[3.0, 4.0]] * 4


@pytest.mark.parametrize("framework", ALL, ids=by_name)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3, 4)])
def test_units_without_elements(framework, shape):
    dtype = framework.dtypes[-1]
    x = framework.array(np.zeros(shape), dtype)
    clipped, norms = framework.call(lambda x: gradclip.adaptive_grad_clip(x, x), x)
    assert framework.to_numpy(clipped).shape == shape
    assert not framework.to_numpy(norms).any()


def test_thresholds_may_be_a_prefix():
    tree = {"a": [np.full((2, 2), 3.0), np.array([4.0])], "b": np.array([5.0])}
    clipped, norms = gradclip.clip_by_unit_norm(tree, {"a": 2.0, "b": np.float32(10)})
    assert clipped["a"][1].round(6).tolist() == [2.0]
    assert clipped["b"].tolist() == [5.0]
    assert norms["a"][0].round(6).tolist() == [4.242641] * 2


def test_dtypes_of_parameters_may_differ():
    x, w = np.full((2, 3), 3.0, np.float16), np.full((2, 3), 0.1, np.float64)
    clipped, norms = gradclip.adaptive_grad_clip(x, w, clipping=0.5)
    assert (clipped.dtype, norms.dtype) == (np.float16, np.float32)
    tensors = [torch.from_numpy(x), torch.from_numpy(w)]
    assert gradclip.adaptive_grad_clip(*tensors, clipping=0.5, unit_axis=1)[0].tolist() == clipped.tolist()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda g: gradclip.clip_by_unit_norm(g, -1.0), ValueError, "max_norm must not be negative"),
        (lambda g: gradclip.clip_by_unit_norm(g, 1.0, ord=0.5), ValueError, "ord must be"),
        (lambda g: gradclip.clip_by_unit_norm(g, 1.0, nonfinite="x"), ValueError, "nonfinite must be"),
        (lambda g: gradclip.clip_by_unit_norm(g, {"x": 1.0}), ValueError, "the thresholds must be one number or"),
        (
            lambda g: gradclip.clip_by_unit_norm(g, 1.0, unit_axis=2),
            ValueError,
            r"unit_axis is 2, but \['w'\] of shape",
        ),
        (lambda g: gradclip.clip_by_unit_norm(g, 1.0, unit_axis=True), TypeError, "unit_axis must be an axis"),
        (lambda g: gradclip.clip_by_unit_norm(g, 1.0, unit_axis="rows"), TypeError, "got 'rows' of type str"),
        (lambda g: gradclip.adaptive_grad_clip(g, g, clipping=-1.0), ValueError, "clipping must not be negative"),
        (lambda g: gradclip.adaptive_grad_clip(g, g, eps=math.nan), ValueError, "eps must not be negative"),
        (lambda g: gradclip.adaptive_grad_clip(g, {"w": g["w"]}), ValueError, r"no parameter for \['b'\]"),
        (lambda g: gradclip.adaptive_grad_clip(g, {**g, "z": g["w"]}), ValueError, r"no gradient at \['z'\]"),
        (lambda g: gradclip.adaptive_grad_clip(g, {**g, "w": g["b"]}), ValueError, r"\['w'\] has shape .2, 3., and"),
        (lambda g: gradclip.adaptive_grad_clip(g, {**g, "w": "x"}), ValueError, "the same shape"),
        (lambda g: gradclip.adaptive_grad_clip(g, {**g, "b": "x"}), TypeError, r"got 'x' .* the parameter of \['b'\]"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call({"w": np.ones((2, 3)), "b": np.float64(1.0)})


def test_sparse_leaves_have_no_units():
    sparse = torch.eye(3).to_sparse()
    for call in (
        lambda: gradclip.clip_by_unit_norm([sparse], 1.0),
        lambda: gradclip.adaptive_grad_clip(sparse, sparse),
    ):
        with pytest.raises(TypeError, match=r"units must be in dense arrays, got a torch\.sparse_coo"):
            call()
    bcoo = BCOO.fromdense(jnp.eye(3))
    with pytest.raises(TypeError, match="units must be in dense arrays"):
        gradclip.clip_by_unit_norm({"w": bcoo}, 1.0)


@pytest.mark.parametrize("policy", ["propagate", "zero", "drop"])
def test_no_value_on_a_device_is_waited_for(policy):
    device = next(framework for framework in ALL if framework.name == "torch-device")
    with device.mode(), FakeTensorMode(), torch.no_grad():  # whose tensors have no values
        tree, params = ([torch.ones(3, 4), torch.ones(5), torch.ones(2, 3, 2, 2)] for _ in range(2))
        clipped, norms = gradclip.adaptive_grad_clip(tree, params, nonfinite=policy)
        gradclip.clip_by_unit_norm(tree, torch.tensor(1.0), nonfinite=policy)
        holders = [torch.nn.Parameter(param) for param in params]
        for holder, gradient in zip(holders, tree, strict=True):
            holder.grad = gradient
        gradclip.adaptive_grad_clip_(holders, nonfinite=policy)
        gradclip.clip_grad_unit_norm_(holders, 1.0, nonfinite=policy)
        assert [x.shape for x in clipped] == [x.shape for x in tree]
        assert [x.shape for x in norms] == [(3,), (), (2,)]
