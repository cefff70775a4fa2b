"""Which elements share a norm: rows, matrices and last axes have norms of their own on every backend."""

import math
from dataclasses import replace
from unittest import mock

import jax
import numpy as np
import pytest

import gradclip._src.backends.jax.host as jax_backend
from frameworks import ALL, PAIRS, by_name, numpy_dtype
from gradclip._src.backends.registry import find
from gradclip._src.core.decision import Clipping
from gradclip._src.core.derivative import ClipRule
from gradclip._src.core.holders import ALONE
from gradclip._src.core.layouts import EXAMPLE, LAYER, TREE, Scope, units_along, units_of_layer
from gradclip._src.core.nonfinite import PROPAGATE, Nonfinite
from gradclip._src.core.norms import Order
from gradclip._src.core.pipeline import decide
from gradclip._src.core.rules import CLIP, Coefficient, Factors, Into

ROW = Scope("row", lambda ndim: (0,) if ndim > 1 else ())
LAST_AXIS = Scope("last axis", lambda ndim: (-1,))
MATRIX = Scope("matrix", lambda ndim: range(ndim - 2))
CASES = (
    (ROW, (6, 5)),
    (ROW, (7,)),
    (LAST_AXIS, (3, 2, 6)),
    (MATRIX, (3, 2, 2, 4)),
)
LARGE = (
    (ROW, (3, 40_000)),
    (LAST_AXIS, (40_000, 3)),
    (MATRIX, (1, 3, 200, 200)),
)
POLICIES = [*[("drop", *case) for case in CASES], ("propagate", *CASES[0]), ("zero", *CASES[2])]
ORDERS = (1.0, 1.5, 2.0, 3.0, math.inf, -math.inf)


def named(value):
    return value.name if isinstance(value, Scope) else by_name(value)


def drawn(shape, dtype, scope, seed=0):
    """Numbers of which the sizes differ from norm to norm: some are kept, some are scaled, some are all zeros."""
    rng = np.random.default_rng([seed, *shape])
    x = rng.normal(size=shape) + (1j * rng.normal(size=shape) if "complex" in dtype else 0.0)
    lengths = scope.norms_shape(shape)
    sizes = np.resize([0.01, 1.0, 30.0, 0.0, 200.0, 3.0], lengths)
    return (x * scope.over(sizes, x)).astype(numpy_dtype(dtype))


def places(scope, shape):
    """The indices of what shares a norm."""
    own = scope.own_axes(len(shape))
    for at in np.ndindex(*scope.norms_shape(shape)):
        yield at, tuple(at[own.index(axis)] if axis in own else slice(None) for axis in range(len(shape)))


def entry(value, at):
    """A coefficient's entry for one norm, or that of its factors."""
    if isinstance(value, Coefficient):
        return Coefficient(
            entry(value.keep, at), entry(value.blank, at), entry(value.wide, at), entry(value.narrow, at)
        )
    if isinstance(value, Factors):
        return Factors(entry(value.first, at), entry(value.second, at))
    return value if value is None else value[at]


def entered(x):
    backend = find([x], lambda: ["x"])
    return backend, backend.enter([backend.prepare(x)])


def scaled_by_norms(x, scope, nonfinite="drop"):
    """The array with a coefficient for each norm, and each part that shares a norm scaled alone by its own."""
    backend, arrays = entered(x)
    with backend.precision():
        made = decide(
            backend,
            arrays,
            Clipping(2.0, Order(2.0), Nonfinite.named(nonfinite), CLIP),
            lambda: ["x"],
            layout=scope,
            holders=ALONE,
        )
        together = backend.leave_all(made.scaled(backend), backend.types_of([x]))[0]
        alone = []
        for at, index in places(scope, x.shape):
            _, part = entered(x[index])
            part = backend.without_nonfinite(part) if nonfinite == "zero" else part
            shrunk = backend.scale(part, entry(made.coefficient, at), LAYER)
            alone.append(backend.leave_all(shrunk, backend.types_of([x[index]]))[0])
    return together, alone


def bits(x):
    """What an array holds, bit for bit, but for which NaN one is."""
    return np.where(np.isnan(x), np.ones((), x.dtype), x).tobytes(), np.isnan(x).tobytes()


# Where each case is compiled, every policy and every scope meets every dtype, but "drop" not in two of the scopes.
COEFFICIENTS = [
    pytest.param(framework, dtype, *policy, id="-".join([framework.name, dtype, *map(str, map(named, policy))]))
    for framework, dtype in PAIRS
    for policy in POLICIES
    if not (framework.jit and policy in (POLICIES[0], POLICIES[2]))
]


@pytest.mark.parametrize(("framework", "dtype", "nonfinite", "scope", "shape"), COEFFICIENTS)
def test_each_norm_has_its_coefficient(framework, dtype, nonfinite, scope, shape):
    values = drawn(shape, dtype, scope)
    values[tuple(n - 1 for n in shape)] = math.inf
    x = framework.array(values, dtype)
    together, alone = framework.call(lambda x: scaled_by_norms(x, scope, nonfinite), x)
    assert together.dtype == x.dtype
    assert together.shape == x.shape
    result = framework.to_numpy(together)
    for (_, index), part in zip(places(scope, shape), alone, strict=True):
        assert bits(result[index]) == bits(framework.to_numpy(part))


@pytest.mark.parametrize("framework", ALL, ids=by_name)
@pytest.mark.parametrize(("scope", "shape"), LARGE, ids=named)
def test_rows_longer_than_a_chunk(framework, scope, shape):
    dtype = framework.dtypes[-1]
    x = framework.array(drawn(shape, dtype, scope), dtype)
    together, alone = framework.call(lambda x: scaled_by_norms(x, scope), x)
    for (_, index), part in zip(places(scope, shape), alone, strict=True):
        assert bits(framework.to_numpy(together)[index]) == bits(framework.to_numpy(part))


@pytest.mark.parametrize("framework", ALL, ids=by_name)
@pytest.mark.parametrize(("scope", "shape"), [*CASES, (EXAMPLE, (6, 2, 3))], ids=named)
def test_norms_are_those_of_what_shares_them(framework, scope, shape):
    dtype, real = ("complex128", "float64") if "complex128" in framework.dtypes else ("float32", "float32")
    values = drawn(shape, dtype, scope)

    def norms(x):
        backend, arrays = entered(x)
        with backend.precision():
            found = [backend.norms(arrays, Order(order), scope).product() for order in ORDERS]
            return [backend.leave_scalar(norm, real, [x]) for norm in found]

    results = framework.call(norms, framework.array(values, dtype))
    for order, found in zip(ORDERS, map(framework.to_numpy, results), strict=True):
        assert found.shape == scope.norms_shape(shape)
        for at, index in places(scope, shape):
            expected = np.linalg.norm(values[index].reshape(-1).astype(np.complex128), order)
            assert found[at] == pytest.approx(expected, rel=1e-6 if dtype == "float32" else 1e-12)


@pytest.mark.parametrize(("scope", "shape"), CASES, ids=named)
def test_compiled_code_without_the_kernels(scope, shape):
    values = drawn(shape, "float32", scope)
    with mock.patch.object(jax_backend, "usable", return_value=False):
        together, alone = jax.jit(lambda x: scaled_by_norms(x, scope))(values)
    for (_, index), part in zip(places(scope, shape), alone, strict=True):
        assert bits(np.asarray(together)[index]) == bits(part)


@pytest.mark.parametrize("framework", ALL, ids=by_name)
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_scopes_of_no_elements(framework, shape):
    x = framework.array(np.zeros(shape), framework.dtypes[-1])
    together, alone = framework.call(lambda x: scaled_by_norms(x, ROW), x)
    assert together.shape == shape
    assert len(alone) == shape[0]


@pytest.mark.parametrize("framework", [framework for framework in ALL if not framework.jit], ids=by_name)
def test_gradients_in_place_are_scaled_by_rows(framework):
    dtype = framework.dtypes[-1]
    values = drawn((6, 5), dtype, ROW)
    x = framework.array(values, dtype)
    with framework.mode():
        backend = find([x], lambda: ["x"])
        arrays = backend.enter_in_place([x], lambda: ["x"])
        with backend.precision():
            made = decide(
                backend,
                arrays,
                Clipping(2.0, Order(2.0), Nonfinite.named("drop"), CLIP),
                lambda: ["x"],
                layout=ROW,
                holders=ALONE,
            )
            (updated,) = made.scaled(backend, Into(arrays, [x]))
    norms = np.linalg.norm(framework.to_numpy(updated), axis=1)
    assert (updated is x) == (not framework.immutable)
    assert norms.tolist() == pytest.approx(np.minimum(np.linalg.norm(values, axis=1), 2.0).tolist(), rel=1e-6)
    kept = np.linalg.norm(values, axis=1) <= 2.0
    assert kept.any()
    assert bits(framework.to_numpy(updated)[kept]) == bits(values[kept])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scope", [LAST_AXIS, ROW], ids=named)
def test_derivatives_are_those_of_what_shares_a_norm(scope, order):
    rng = np.random.default_rng(3)
    x, dx, gy = rng.normal(size=(3, 4, 5, 6))
    rule = ClipRule(Order(order), 1.5, PROPAGATE, CLIP, scope)
    norm = np.array([np.linalg.norm(x[index].reshape(-1), order) for _, index in places(scope, x.shape)])
    gnorm = rng.normal(size=norm.shape)
    (dys,), dnorm = rule.jvp(np, rule.at([x], norm, None, None), [dx], 0.0, [x.dtype])
    (gxs,), gmax = rule.vjp(np, rule.at([x], norm, None, None), [gy], gnorm)
    alone, total = replace(rule, scope=LAYER), 0.0
    for (i,), index in places(scope, x.shape):
        at = alone.at([x[index]], norm[i], None, None)
        (dy,), dn = alone.jvp(np, at, [dx[index]], 0.0, [x.dtype])
        (gx,), g = alone.vjp(np, at, [gy[index]], gnorm[i])
        assert dys[index] == pytest.approx(dy, rel=1e-12)
        assert dnorm[i] == pytest.approx(dn, rel=1e-12)
        assert gxs[index] == pytest.approx(gx, rel=1e-12)
        total += g
    assert gmax == pytest.approx(total, rel=1e-12)


def test_axes():
    assert (TREE.whole, LAYER.whole, EXAMPLE.whole) == (True, True, False)
    assert (TREE.own_axes(3), TREE.shared_axes(3), TREE.elements((2, 3))) == ((), (0, 1, 2), 6)
    assert (EXAMPLE.own_axes(3), EXAMPLE.shared_axes(3), EXAMPLE.norms_shape((4, 2, 3))) == ((0,), (1, 2), (4,))
    assert (LAST_AXIS.own_axes(3), LAST_AXIS.shared_axes(3), LAST_AXIS.elements((4, 2, 3))) == ((2,), (0, 1), 8)
    assert (MATRIX.own_axes(4), MATRIX.norms_shape((5, 6, 2, 3)), MATRIX.elements((5, 6, 2, 3))) == ((0, 1), (5, 6), 6)
    assert [scope.own_axes(0) for scope in (TREE, EXAMPLE, LAST_AXIS)] == [(), (), ()]


@pytest.mark.parametrize(
    ("shape", "first", "last"),
    [
        ((), (), ()),
        ((5,), (), ()),
        ((4, 3), (0,), (1,)),
        ((1, 3), (0,), ()),
        ((4, 3, 2), (0,), (1, 2)),
        ((1, 3, 1), (0,), ()),
        ((5, 4, 3, 2), (0,), (3,)),
        ((6, 5, 4, 3, 2), (0,), (4,)),
        ((0, 3), (0,), (1,)),
    ],
)
def test_units_of_a_layer(shape, first, last):
    for outputs_first, own in ((True, first), (False, last)):
        scope = units_of_layer(shape, first=outputs_first)
        assert scope == units_along(own)
        assert hash(scope) == hash(units_along(own))
        assert (scope.own_axes(len(shape)), scope.whole) == (own, False)
