"""Private sums of a batch that is split over the devices of a mesh: each method, with padding, masks, microbatches."""

import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import gradclip
from gradclip._src.private.ghost import plan, step
from sharded_jax.layouts import AxisType, P, mesh_of, placed, run

RNG = np.random.default_rng(0)
KINDS = [AxisType.Auto, AxisType.Explicit]
METHODS = ["auto", "materialize", "ghost", "loop"]
OPTIONS = {"padded": {"pad_to": 16}, "longer": {"pad_to": 24}, "microbatches": {"microbatch_size": 8}}
C = 512.0


def integers(*shape):
    """Small integers: gradients of `loss` are then exact, wherever they are computed."""
    return RNG.integers(-3, 4, shape).astype(np.float32)


PARAMS = {"w": integers(4, 8), "v": integers(8, 3), "b": integers(3)}
BATCH = integers(16, 4), integers(16, 3)
MASK = np.arange(16) % 3 > 0


def loss(p, x, y):
    return jnp.sum((jax.nn.relu(x @ p["w"]) @ p["v"] + p["b"] - y) ** 2) / 2


def function(**options):
    given = {"batch_argnums": (1, 2), "keep_batch_dim": False, "return_norms": True}
    return gradclip.clipped_grad(loss, C, **given | options)


GRADIENTS = jax.tree.map(np.float64, jax.vmap(jax.grad(loss), (None, 0, 0))(PARAMS, *BATCH))
NORMS = np.sqrt(sum((g**2).reshape(16, -1).sum(1) for g in GRADIENTS.values()))
assert MASK[NORMS <= C].any()
assert MASK[NORMS > C].any()


def exact(mask):
    weights = np.minimum(1.0, C / NORMS) * mask
    return {name: np.tensordot(weights, g, 1) for name, g in GRADIENTS.items()}


def distance(found, wanted):
    return np.sqrt(sum(np.sum((np.float64(found[name]) - wanted[name]) ** 2) for name in wanted))


@pytest.fixture(autouse=True)
def _small_parameters_have_factors(monkeypatch):
    for module in (plan, step):
        monkeypatch.setattr(module, "SMALLEST", 1)


@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS[1:])
def test_the_sum_is_that_of_one_device(kind, devices, method):
    mesh, without = mesh_of((devices,), kind), MASK & (np.arange(16) != 4)
    with jax.set_mesh(mesh):
        params = {name: jax.device_put(x, NamedSharding(mesh, P())) for name, x in PARAMS.items()}
        batch = placed(mesh, [P("x"), P("x")], BATCH)
        masks = placed(mesh, [P("x"), P("x")], [MASK, without])
        for options in OPTIONS.values():
            clipped = function(method=method, **options)
            call = jax.jit(lambda p, x, y, mask, clipped=clipped: clipped(p, x, y, mask=mask))
            sums = []
            for mask in masks:
                summed, outputs = call(params, *batch, mask)
                np.testing.assert_allclose(outputs.norms, np.where(mask, NORMS, 0.0), rtol=1e-6)
                sums.append({name: np.float64(x) for name, x in summed.items()})
            promised = clipped.sensitivity(batch_size=24)
            for found, mask in zip(sums, (MASK, without), strict=True):
                # Norms are raised, and coefficients lowered, by less than a millionth.
                assert distance(found, exact(mask)) <= promised.rounding + 1e-6 * C * 16
            assert distance(*sums) <= promised.total
            assert all(x.sharding.is_fully_replicated for x in summed.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_eager_calls(kind, method):
    mesh = mesh_of((8,), kind)
    with jax.set_mesh(mesh):
        params = {name: jax.device_put(x, NamedSharding(mesh, P())) for name, x in PARAMS.items()}
        batch = placed(mesh, [P("x"), P("x")], BATCH)
        summed, _ = function(method=method, pad_to=16)(params, *batch, mask=MASK)
    assert distance(summed, exact(MASK)) <= 1e-4 * C


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["materialize", "ghost"])
def test_each_device_clips_its_own_examples(kind, method):
    mesh = mesh_of((8,), kind)
    clipped = function(method=method, pad_to=16, return_norms=False)
    params = {name: jax.device_put(x, NamedSharding(mesh, P())) for name, x in PARAMS.items()}
    batch = placed(mesh, [P("x")] * 3, [*BATCH, MASK])
    if method == "ghost":
        assert clipped.plan(jax.tree.map(jnp.asarray, PARAMS), *BATCH).ghost
    # No mesh is set: the arrays say where they are.
    summed, sent = run(lambda p, x, y, mask: clipped(p, x, y, mask=mask), params, *batch)
    assert distance(summed, exact(MASK)) <= 1e-4 * C
    assert set(sent) == {"all-reduce"}


@pytest.mark.parametrize("method", ["materialize", "ghost", "loop"])
@pytest.mark.parametrize("axis", ["x", "y"])
def test_parameters_that_are_split_too(method, axis):
    mesh = mesh_of((4, 2), AxisType.Explicit)
    specs = {"w": P(None, axis), "v": P(axis), "b": P()}
    clipped = function(method=method, pad_to=24, return_norms=False)
    with jax.set_mesh(mesh):
        params = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in PARAMS.items()}
        summed = jax.jit(clipped)(params, *placed(mesh, [P("x"), P("x")], BATCH))
    assert distance(summed, exact(np.ones(16))) <= 1e-4 * C
    assert all(x.sharding.is_fully_replicated for x in summed.values())


def test_arguments_and_keys_are_split_as_the_batch():
    """NumPy arrays, a mask that is not split, random keys, padding with more rows, and outputs of examples."""

    def with_key(p, x, y, key):
        kept = x * jax.random.bernoulli(key, 0.5, x.shape)
        return loss(p, kept, y), kept

    clipped = gradclip.clipped_grad(
        with_key, C, batch_argnums=(1, 2), keep_batch_dim=False, prng_argnum=3, pad_to=24, has_aux=True
    )
    args = [jax.tree.map(jnp.asarray, PARAMS), *BATCH, jax.random.key(1)]
    wanted, (_, _, aux) = clipped(*args, mask=MASK)
    mesh = mesh_of((8,), AxisType.Explicit)
    with jax.set_mesh(mesh):
        args[1:2] = placed(mesh, [P("x")], BATCH[:1])
        found, outputs = jax.jit(lambda *args: clipped(*args, mask=MASK))(*args)
    np.testing.assert_array_equal(outputs.aux, aux)
    assert distance(found, {name: np.float64(x) for name, x in wanted.items()}) <= 1e-6 * C


def test_a_function_that_names_the_mesh_is_refused():
    mesh = mesh_of((8,), AxisType.Explicit)
    with jax.set_mesh(mesh):
        w, x = placed(mesh, [P(), P("x")], [PARAMS["w"], BATCH[0]])
        for loss in (
            lambda p, x: jnp.sum(x @ p * (x @ w)),
            lambda p, x: jnp.sum(jnp.dot(x, p, out_sharding=P("x"))),
        ):
            with pytest.raises(ValueError, match=r"mesh|Auto"):
                gradclip.clipped_grad(loss, C, keep_batch_dim=False, pad_to=16)(w, x)


def convolved(p, x):
    return jnp.sum(jax.lax.conv_general_dilated(x[None, None], p["kernel"], (1,), "VALID") ** 2) / 2


def looked_up(p, x):
    return jnp.sum(p["table"][x.astype(int) % 3] ** 2) / 2


@pytest.mark.parametrize("loss", [convolved, looked_up])
def test_operations_whose_layout_jax_would_ask_for(loss):
    x, params = integers(16, 6), {"kernel": jnp.asarray(integers(2, 1, 3)), "table": jnp.asarray(integers(3, 2))}
    clipped = gradclip.clipped_grad(loss, C, keep_batch_dim=False, pad_to=16)
    wanted = clipped(params, x, mask=MASK)
    mesh = mesh_of((8,), AxisType.Explicit)
    args = jax.device_put(params, NamedSharding(mesh, P())), *placed(mesh, [P("x"), P("x")], [x, MASK])
    found = jax.jit(lambda p, x, mask: clipped(p, x, mask=mask))(*args)
    for name in params:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", [P(), P("x")])
def test_noise_is_drawn_once_for_each_element_of_the_whole_sum(kind, spec):
    mesh = mesh_of((8,), kind)
    (total,) = placed(mesh, [spec], [np.zeros(4096, np.float32)])
    sensitivity = gradclip.Sensitivity(bound=1.0, unit="example", relation="add_or_remove_one")
    noisy = gradclip.add_noise(total, sensitivity, noise_multiplier=2.0)
    assert len(set(np.asarray(noisy).tolist())) > 4000
    assert np.std(noisy) == pytest.approx(2.0, rel=0.2)
    assert noisy.sharding.is_equivalent_to(total.sharding, 1)


def test_the_example_trains_on_eight_devices(capsys):
    example = Path(__file__).parents[2] / "examples" / "private_mesh_jax.py"
    runpy.run_path(str(example), run_name="__main__")
    printed = capsys.readouterr().out
    assert "8 devices, all with the same parameters: True" in printed
    assert "error below 0.5: True" in printed
