"""Noise for the sums of every framework, exact and by its own generator."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from frameworks import WITH_FLOAT32, by_name
from gradclip import PoissonBatches, PrivateRun
from gradclip._src.private.noise import discrete
from gradclip._src.private.noise.add import add_noise
from gradclip._src.private.sums.sensitivity import Sensitivity, clipped_sum_sensitivity
from recorded import recorded

ONE = Sensitivity(1.0, "example", relation="add_or_remove_one")
GRID = clipped_sum_sensitivity(1.0, batch_size=8, grid=2**20)
EAGER = [framework for framework in WITH_FLOAT32 if not framework.jit]


def generator_for(name):
    if name.startswith("torch"):
        return torch.Generator().manual_seed(3)
    if name.startswith("jax"):
        return jax.random.key(3)
    if name.startswith("mlx"):
        import mlx.core as mx

        return mx.random.key(3)
    if name == "tensorflow":
        import tensorflow as tf

        return tf.random.Generator.from_seed(3)
    return np.random.default_rng(3)


@pytest.fixture
def plus_ones(monkeypatch):
    """Replace the samplers: the noise is 1."""
    monkeypatch.setattr(discrete, "sampler", lambda source, scale: lambda piece: piece + 1)


@pytest.mark.parametrize("framework", EAGER, ids=by_name)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_exact_noise_is_a_multiple_of_the_step(framework, dtype, plus_ones):
    summed = {"w": framework.array([[0.5, -1.0]], dtype), "b": [framework.array([2.0**-10, 0.0], dtype)]}
    found = add_noise(summed, ONE, noise_multiplier=1.0, rng="system")
    assert type(found["w"]) is type(summed["w"])
    assert found["w"].dtype == summed["w"].dtype
    numbers = framework.numbers(found)
    expected = np.array([0.5, -1.0, 2.0**-10, 0.0]) + 2.0**-17
    flat = np.concatenate([numbers["w"].reshape(-1), numbers["b"][0]])
    assert flat.tolist() == expected.astype(flat.dtype).tolist()


@pytest.mark.parametrize("framework", [f for f in EAGER if not f.name.startswith("jax")], ids=by_name)
def test_integers_stay_integers(framework, plus_ones):
    found = add_noise([framework.array([[2**53 + 1, -3]], "int64")], GRID, noise_multiplier=1.0, rng="system")
    assert framework.numbers(found)[0].tolist() == [[2**53 + 2, -2]]
    assert framework.numbers(found)[0].dtype == np.int64


def test_integers_of_jax_need_its_64_bit_mode(plus_ones):
    with jax.enable_x64(True):
        summed = jnp.array([2**53 + 1, -3])
        assert add_noise(summed, GRID, noise_multiplier=1.0, rng="system").tolist() == [2**53 + 2, -2]
    with pytest.raises(ValueError, match=r"JAX has no int64 in 32-bit mode. Enable jax_enable_x64"):
        add_noise(summed, GRID, noise_multiplier=1.0, rng="system")


@pytest.mark.parametrize("framework", EAGER, ids=by_name)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_generators_noise_is_normal_and_repeats_with_its_seed(framework, dtype):
    summed = {"w": framework.array(np.zeros((80, 100)), dtype), "b": framework.array(np.full(2000, 3.0), dtype)}
    first, second = (add_noise(summed, ONE, noise_multiplier=2.0, rng=generator_for(framework.name)) for _ in range(2))
    first, second = framework.numbers(first), framework.numbers(second)
    assert first["w"].tolist() == second["w"].tolist()
    assert first["w"].dtype == framework.numbers(summed)["w"].dtype
    for found, mean in ((first["w"], 0.0), (first["b"], 3.0)):
        wide = found.astype(np.float64)
        assert abs(wide.mean() - mean) < 5 * 2.0 / wide.size**0.5
        assert abs(wide.std() / 2.0 - 1) < 5 / (2 * wide.size) ** 0.5
    # Leaves do not share their noise.
    assert first["w"].reshape(-1)[:2000].tolist() != (first["b"] - 3.0).tolist()


def test_in_compiled_jax_code():
    noised = jax.jit(lambda tree, key: add_noise(tree, ONE, noise_multiplier=2.0, rng=key))
    summed = {"w": jnp.ones(3, jnp.bfloat16), "b": jnp.zeros(2)}
    found, key = noised(summed, jax.random.key(1)), jax.random.key(1)
    eager = add_noise(summed, ONE, noise_multiplier=2.0, rng=key)
    assert found["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found["b"]), np.asarray(eager["b"]), rtol=1e-6)
    assert add_noise(summed, ONE, noise_multiplier=2.0, rng=jax.random.PRNGKey(1))["b"].tolist() == eager["b"].tolist()


RECORDERS = ["jax.jit", "jax.vmap", "torch.compile", "torch.vmap", "make_fx", "tf.function", "mlx.compile"]


MAKERS = {"torch.compile": "torch", "torch.vmap": "torch", "make_fx": "torch", "tf.function": "tensorflow"}


@pytest.mark.parametrize("name", RECORDERS)
@pytest.mark.parametrize("exact", [True, False])
def test_a_run_counts_no_releases_of_compiled_code(name, exact):
    # A recorded function runs many times, and would count once.
    rng = "system" if exact else generator_for(MAKERS.get(name, "numpy"))
    batches = PoissonBatches(10, 0.5, steps=4)
    sensitivity = clipped_sum_sensitivity(1.0, batch_size=batches.pad_to)
    run = PrivateRun(batches, sensitivity, delta=1e-2, noise_multiplier=1.0, rng=rng)
    with pytest.raises(ValueError, match=r"a run counts what it releases, .* outside of compiled code"):
        recorded(name)(lambda x: run.add_noise(x))
    assert run.releases == 0


@pytest.mark.filterwarnings("ignore:`torch.jit.trace`")
def test_under_jit_trace_nothing_is_released():
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace"):
        torch.jit.trace(lambda x: add_noise(x, ONE, noise_multiplier=1.0, rng="system"), torch.ones(2))


def test_float64_noise_has_the_precision_of_float64():
    for summed, name in ((np.zeros(50), "numpy"), (torch.zeros(50, dtype=torch.float64), "torch")):
        found = np.asarray(add_noise(summed, ONE, noise_multiplier=1.0, rng=generator_for(name)))
        assert (found != found.astype(np.float32)).all()


@pytest.mark.parametrize("framework", EAGER, ids=by_name)
def test_a_generator_of_another_framework_is_refused(framework):
    other = generator_for("numpy" if framework.name != "numpy" else "torch")
    with pytest.raises(TypeError, match=r"rng must be 'system' or a .+ for these arrays, got .+ of type Generator"):
        add_noise(framework.array([1.0]), ONE, noise_multiplier=1.0, rng=other)
    with pytest.raises(TypeError, match="for these arrays, got 0 of type int"):
        add_noise(framework.array([1.0]), ONE, noise_multiplier=1.0, rng=0)


def test_an_array_of_mlx_that_is_no_key_is_refused():
    import mlx.core as mx

    for other in (mx.zeros(2), mx.zeros(3, mx.uint32), mx.array(3)):
        with pytest.raises(TypeError, match=r"must be a key of MLX, as mx.random.key\(seed\) returns, got an array of"):
            add_noise(mx.zeros(3), ONE, noise_multiplier=1.0, rng=other)


@pytest.mark.parametrize("framework", EAGER, ids=by_name)
def test_generators_are_not_for_sums_on_a_grid(framework):
    with jax.enable_x64(True):
        summed = framework.array([1], "int64")
        with pytest.raises(TypeError, match="noise for a sum on a grid is exact: pass rng='system'"):
            add_noise(summed, GRID, noise_multiplier=1.0, rng=generator_for(framework.name))


def test_one_sum_holds_arrays_of_one_framework():
    with pytest.raises(TypeError, match="one sum must hold arrays of one framework"):
        add_noise([np.ones(1), torch.ones(1)], ONE, noise_multiplier=1.0, rng=np.random.default_rng(0))


def test_what_holds_no_numbers_comes_back():
    empty = np.zeros(3, jax.dtypes.float0)
    found = add_noise({"w": jnp.ones(2), "step": empty, "none": None}, ONE, noise_multiplier=1.0, rng=jax.random.key(0))
    assert found["step"] is empty
    assert found["none"] is None


def test_a_sum_of_several_processes_is_for_compiled_code(monkeypatch):
    x = jnp.zeros(3)
    monkeypatch.setattr(type(x), "is_fully_addressable", False)  # a real one needs several processes
    with pytest.raises(ValueError, match=r"on devices of several processes. Call add_noise inside of jax.jit"):
        add_noise(x, ONE, noise_multiplier=1.0)
