"""Exact noise in compiled programs: what a call adds, drawn anew at each run, or an error."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import fresh_process
from gradclip._src.private.noise import discrete
from gradclip._src.private.noise.add import add_noise
from gradclip._src.private.sums.layout import SumLayout
from gradclip._src.private.sums.sensitivity import Sensitivity, clipped_sum_sensitivity
from recorded import recorded

ONE = Sensitivity(1.0, "example", relation="add_or_remove_one")
HALVES = clipped_sum_sensitivity(1.0, batch_size=8, layout=SumLayout(partial_sums_in="bfloat16"))
GRID = clipped_sum_sensitivity(1.0, batch_size=8, grid=2**20)


@pytest.fixture
def plus_ones(monkeypatch):
    """Replace the samplers: the noise is 1."""
    monkeypatch.setattr(discrete, "sampler", lambda source, scale: lambda piece: piece + 1)


@pytest.mark.parametrize("name", ["torch.vmap", "make_fx", "tf.function"])
def test_exact_noise_is_not_for_every_kind_of_recording(name):
    with pytest.raises(ValueError, match=r"rng='system' draws outside of code that is recorded in this way. Return"):
        recorded(name)(lambda x: add_noise(x, ONE, noise_multiplier=1.0, rng="system"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_exact_noise_in_a_program_of_jax(dtype, plus_ones):
    summed = {"w": jnp.asarray([[0.5, -1.0]], dtype), "b": [jnp.asarray(2.0**-10, dtype)], "n": jnp.zeros(0, dtype)}
    found = jax.jit(lambda tree: add_noise(tree, ONE, noise_multiplier=1.0))(summed)
    expected = add_noise(summed, ONE, noise_multiplier=1.0)
    assert jax.tree.map(lambda x: (x.dtype, x.tolist()), found) == jax.tree.map(
        lambda x: (x.dtype, x.tolist()), expected
    )


def test_integers_of_a_grid_in_a_program_of_jax(plus_ones):
    with jax.enable_x64(True):
        program = jax.jit(lambda x: add_noise(x, GRID, noise_multiplier=1.0))
        assert program(jnp.array([2**53 + 1, -3])).tolist() == [2**53 + 2, -2]


def all_differ(rows):
    return len({tuple(np.asarray(row).reshape(-1).tolist()) for row in rows}) == len(rows)


def test_a_program_of_jax_draws_at_each_run():
    def step(total, _):
        return add_noise(total, ONE, noise_multiplier=1.0), total

    once = jax.jit(lambda x: (add_noise(x, ONE, noise_multiplier=1.0), add_noise(x, ONE, noise_multiplier=1.0)))
    zeros = jnp.zeros(30)
    assert all_differ([*once(zeros), *once(zeros)])
    _, totals = jax.jit(lambda x: jax.lax.scan(step, x, length=5))(zeros)
    assert all_differ(totals)
    assert all_differ(np.diff(totals, axis=0))
    assert all_differ(jax.vmap(lambda x: add_noise(x, ONE, noise_multiplier=1.0))(jnp.zeros((5, 30))))
    with pytest.raises(ValueError, match="do not support JVP"):
        jax.grad(lambda x: add_noise(x, ONE, noise_multiplier=1.0).sum())(zeros)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_program_of_torch_draws_at_each_run(backend):
    program = torch.compile(
        lambda x: [add_noise({"w": y, "b": y.bfloat16().t()}, HALVES, noise_multiplier=1.0) for y in (x, x)],
        fullgraph=True,
        backend=backend,
    )
    runs = [tree for _ in range(2) for tree in program(torch.zeros(6, 5))]
    for name, shape, dtype in (("w", (6, 5), torch.float32), ("b", (5, 6), torch.bfloat16)):
        assert all_differ([tree[name].float() for tree in runs])
        assert {(tree[name].shape, tree[name].dtype) for tree in runs} == {(shape, dtype)}
    steps = np.stack([tree["w"] for tree in runs]) * 2.0**19  # 60 elements: s is 2**-19
    assert (steps == np.rint(steps)).all()


def test_a_program_of_torch_adds_what_a_call_adds(plus_ones):
    summed = {"w": torch.tensor([[0.5, -1.0]]).t(), "b": torch.zeros(0)}
    found = torch.compile(lambda tree: add_noise(tree, ONE, noise_multiplier=1.0), fullgraph=True, backend="aot_eager")(
        summed
    )
    expected = add_noise(summed, ONE, noise_multiplier=1.0)
    assert {name: x.tolist() for name, x in found.items()} == {name: x.tolist() for name, x in expected.items()}


@pytest.mark.parametrize("make", [np.zeros, jnp.zeros])
def test_sums_that_a_program_of_jax_closes_over_get_noise_at_each_run(make):
    constant = make(30, np.float32)
    program = jax.jit(lambda x: x + add_noise(constant, ONE, noise_multiplier=1.0))
    assert all_differ([program(jnp.zeros(30)) for _ in range(3)])
    _, rows = jax.lax.scan(lambda k, _: (k, add_noise(constant, ONE, noise_multiplier=1.0)), 0.0, length=3)
    assert all_differ(rows)


@pytest.mark.parametrize("name", ["torch.vmap", "make_fx", "tf.function", "torch.jit.trace"])
@pytest.mark.filterwarnings("ignore:`torch.jit.trace`")
def test_other_programs_close_over_no_sum(name):
    constant = np.zeros(2, np.float32)
    record = recorded(name) if name != "torch.jit.trace" else lambda fun: torch.jit.trace(fun, torch.ones(2))
    with pytest.raises(ValueError, match=r"draws outside of code that is recorded in this way"):
        record(lambda x: x + add_noise(constant, ONE, noise_multiplier=1.0))


def test_a_program_of_torch_takes_sums_of_all_sizes():
    program = torch.compile(
        lambda x: add_noise(x, ONE, noise_multiplier=1.0), fullgraph=True, backend="aot_eager", dynamic=None
    )
    for size in (3, 4, 300):
        steps = program(torch.zeros(size)).double() * 2.0 ** (16 + math.ceil(math.log2(size) / 2))
        assert (steps == steps.round()).all()
        assert steps.shape == (size,)
    assert program(torch.zeros(2, requires_grad=True)).requires_grad is False


def test_noise_for_other_arrays_leaves_jax_alone():
    script = "import numpy, jax; from jax._src import xla_bridge; import gradclip;"
    script += "one = gradclip.Sensitivity(bound=1.0, unit='example', relation='add_or_remove_one');"
    script += "gradclip.add_noise(numpy.zeros(3), one, noise_multiplier=1.0);"
    assert fresh_process.run(script + "print(xla_bridge.backends_are_initialized())", ".") == "False"
