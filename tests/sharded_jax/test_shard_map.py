"""Inside of shard_map: axis_name, by one reduction, what is replicated counted once."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradclip
from sharded_jax.layouts import AxisType, P, assert_bound, assert_same, draw, mesh_of, run

WHOLE = P()
ORDERS = [1, 2, 3, math.inf, -math.inf]


@pytest.fixture(autouse=True)
def doubles():
    with jax.enable_x64(True):
        yield


def mapped(function, mesh, specs, out_specs, *, checked=True):
    return jax.shard_map(function, mesh=mesh, in_specs=(specs,), out_specs=out_specs, check_vma=checked)


def over_x(function, *, checked=True, out_specs=WHOLE):
    return mapped(function, mesh_of((8,), AxisType.Auto), P("x"), out_specs, checked=checked)


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_as_on_one_device(seed, checked):
    """Leaves may be replicated over axes where JAX keeps track of it; elsewhere all are split over all."""
    layout = draw(seed, AxisType.Auto, all_axes=not checked)
    ord = ORDERS[seed % len(ORDERS)]

    def clip(tree):
        return gradclip.clip_by_global_norm(tree, 0.5, ord=ord, axis_name=layout.names)

    call = mapped(clip, layout.mesh, layout.specs, (layout.specs, P()), checked=checked)
    (results, norm), sent = run(call, layout.tree)
    assert_same(results, norm, *gradclip.clip_by_global_norm(layout.whole, 0.5, ord=ord))
    assert_bound(results, ord, 0.5)
    assert sent == ({"all-reduce": 1} if any(map(any, layout.specs)) else {})


@pytest.mark.parametrize("checked", [True, False])
def test_integers_stay_and_count_nothing(checked):
    tree = {"n": jnp.arange(8) + 100, "w": jnp.linspace(-1.0, 2.0, 16)}

    def clip(tree):
        return gradclip.clip_by_global_norm(tree, 0.5, axis_name="x"), gradclip.layer_norms(tree, axis_name="x")

    specs = ((P("x"), WHOLE), WHOLE)
    (clipped, norm), norms = jax.jit(over_x(clip, checked=checked, out_specs=specs))(tree)
    expected, known = gradclip.clip_by_global_norm({"w": tree["w"]}, 0.5)
    np.testing.assert_allclose(clipped["w"], expected["w"], rtol=1e-12)
    np.testing.assert_allclose([norm, norms["w"], norms["n"]], [known, known, 0.0], rtol=1e-12)
    assert clipped["n"].tolist() == tree["n"].tolist()


@pytest.mark.parametrize("ord", [2, math.inf])
def test_layers_by_one_reduction(ord):
    layout = draw(4, AxisType.Auto)

    def clip(tree):
        return gradclip.clip_by_layer_norm(tree, 0.5, ord=ord, axis_name=layout.names)

    call = mapped(clip, layout.mesh, layout.specs, (layout.specs, P()))
    (results, norms), sent = run(call, layout.tree)
    expected, wanted = gradclip.clip_by_layer_norm(layout.whole, 0.5, ord=ord)
    for i, result in enumerate(results):
        assert_same([result], norms[i], [expected[i]], wanted[i])
    assert sent == {"all-reduce": 1}
    alone = mapped(lambda t: gradclip.layer_norms(t, ord, axis_name=layout.names), layout.mesh, layout.specs, P())
    assert list(map(float, jax.jit(alone)(layout.tree))) == pytest.approx(list(map(float, norms)), rel=1e-12)


def test_along_one_of_two_axes():
    mesh = mesh_of((4, 2), AxisType.Auto)
    call = mapped(lambda x: gradclip.global_norm(x, axis_name="x")[None], mesh, P("x", "y"), P("y"))
    columns = np.array([[3.0, 5.0], [4.0, 12.0], [0.0, 0.0], [0.0, 0.0]])
    assert jax.jit(call)(columns).tolist() == [5.0, 13.0]


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_all_devices_agree_on_what_is_not_finite(checked, bad):
    values = np.arange(1.0, 9.0)
    values[5] = bad

    def clip(policy):
        function = lambda x: gradclip.clip_by_global_norm(x, 0.5, nonfinite=policy, axis_name="x")[0]
        return jax.jit(over_x(function, checked=checked, out_specs=P("x")))(values)

    assert np.isnan(clip("propagate")).all()
    assert not np.any(clip("drop"))
    np.testing.assert_allclose(clip("zero"), gradclip.clip_by_global_norm(values, 0.5, nonfinite="zero")[0], rtol=1e-13)
    with pytest.raises(ValueError, match="nonfinite='raise'"):
        clip("raise")


@pytest.mark.parametrize("scale", [1e-300, 1e307])
def test_any_magnitude(scale):
    norm = jax.jit(over_x(lambda x: gradclip.global_norm(x, axis_name="x")))(np.full(8, scale))
    assert float(norm) == pytest.approx(scale * math.sqrt(8), rel=1e-14)


def test_bits_stay_below_the_threshold():
    values = np.random.default_rng(0).standard_normal(80).astype(np.float32)
    clip = over_x(lambda x: gradclip.clip_by_global_norm(x, 100.0, axis_name="x")[0], out_specs=P("x"))
    assert np.array_equal(jax.jit(clip)(values), values)


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("ord", [2, 3, math.inf])
def test_gradients_go_through(checked, ord):
    values = np.append(np.arange(1.0, 8.0), -7.0)
    call = over_x(
        lambda x: gradclip.clip_by_global_norm(x, 2.0, ord=ord, axis_name="x"),
        checked=checked,
        out_specs=(P("x"), P()),
    )

    def loss(clip, x):
        clipped, norm = clip(x)
        return norm + jnp.sum(clipped**3)

    found = jax.jit(jax.grad(lambda x: loss(call, x)))(values)
    wanted = jax.grad(lambda x: loss(lambda x: gradclip.clip_by_global_norm(x, 2.0, ord=ord), x))(jnp.asarray(values))
    np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-15)


def test_the_gradient_at_zero_is_finite():
    norm = over_x(lambda x: gradclip.global_norm(x, axis_name="x"))
    assert not np.any(jax.jit(jax.grad(norm))(np.zeros(8)))


def test_what_cannot_be_asked_for():
    with pytest.raises(ValueError, match="at most 8, inf or -inf"):
        jax.jit(over_x(lambda x: gradclip.global_norm(x, 9, axis_name="x")))(np.ones(8))
    with pytest.raises(NameError, match="nowhere"):
        jax.jit(over_x(lambda x: gradclip.global_norm(x, axis_name="nowhere")))(np.ones(8))
    with pytest.raises(TypeError, match=r"axis_name='x' names axes of a mesh inside jax\.shard_map"):
        gradclip.global_norm(np.ones(8), axis_name="x")
    assert float(gradclip.global_norm({}, axis_name="x")) == 0.0


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("ord", ORDERS)
def test_units_over_devices_are_those_of_one(ord, checked):
    """Columns are units: each is split over "x", and "y" has columns of its own."""
    mesh, specs = mesh_of((4, 2), AxisType.Auto), {"w": P("x", "y"), "b": P("x")}
    rng = np.random.default_rng(0)
    tree, params = ({"w": rng.normal(size=(8, 6)) * 2, "b": rng.normal(size=8) / 3} for _ in range(2))

    def units(axis_name):
        return lambda t, _: gradclip.clip_by_unit_norm(t, 0.7, unit_axis=1, ord=ord, axis_name=axis_name)

    def relative(axis_name):
        options = {"clipping": 0.3, "unit_axis": 1, "ord": ord, "axis_name": axis_name}
        return lambda t, w: gradclip.adaptive_grad_clip(t, w, **options)

    def loss(call):
        return lambda *args: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(call(*args)))

    out_specs = (specs, {"w": P("y"), "b": P()})
    for make in (units, relative):
        call = jax.shard_map(make("x"), mesh=mesh, in_specs=(specs, specs), out_specs=out_specs, check_vma=checked)
        found, wanted = jax.jit(call)(tree, params), make(None)(tree, params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), found, wanted)
        found, wanted = (jax.jit(jax.grad(loss(one), (0, 1)))(tree, params) for one in (call, make(None)))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9), found, wanted)


def test_units_of_too_high_an_order_are_refused():
    call = over_x(lambda x: gradclip.clip_by_unit_norm(x, 1.0, unit_axis=1, ord=9, axis_name="x")[1])
    with pytest.raises(ValueError, match="ord must be at most 8"):
        jax.jit(call)(np.ones((8, 2)))
    with pytest.raises(TypeError, match=r"axis_name='x' names axes of a mesh inside jax\.shard_map"):
        gradclip.clip_by_unit_norm(np.ones((8, 2)), 1.0, axis_name="x")
    with pytest.raises(TypeError, match=r"axis_name='x' names axes of a mesh inside jax\.shard_map"):
        gradclip.adaptive_grad_clip(np.ones((8, 2)), np.ones((8, 2)), axis_name="x")


@pytest.mark.parametrize("axis", [None, -1])
@pytest.mark.parametrize("call", [gradclip.clip_by_unit_norm, lambda x, _, **k: gradclip.adaptive_grad_clip(x, x, **k)])
def test_one_row_on_each_device_does_not_show_that_columns_are_units(call, axis):
    values = np.arange(1.0, 25.0).reshape(8, 3)
    clip = jax.jit(over_x(lambda x: call(x, 1.0, unit_axis=axis, axis_name="x")[0], out_specs=P("x")))
    if axis is None:
        with pytest.raises(ValueError, match=r"the gradient has shape \(1, 3\) on each device, .* pass unit_axis="):
            clip(values)
    else:
        np.testing.assert_allclose(clip(values), call(values, 1.0)[0], rtol=1e-12)
