"""`clipped_grad` and `clipped_fun` beside a loop over examples, written out with each framework's own derivative."""

import contextlib
import math
from functools import cache
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip

BATCH, MASK = 7, np.array([True, False, True, True, True, False, False])
RTOL = {"float32": 1e-6, "float64": 1e-12}


class Jax:
    """JAX, eager or compiled."""

    xp = jnp

    def __init__(self, dtype, jit):
        self.dtype, self.jit = dtype, jit

    def array(self, values):
        return jnp.asarray(np.asarray(values, self.dtype))

    def mode(self):
        return jax.enable_x64(self.dtype == "float64")

    def gradient(self, fun, *args):
        return gradient_in_jax(fun)(*args)

    def value(self, fun, *args):
        return value_in_jax(fun)(*args)

    def call(self, clipped, *args, **kwargs):
        return (jax.jit(clipped) if self.jit else clipped)(*args, **kwargs)


@cache
def gradient_in_jax(fun):
    return jax.jit(jax.grad(fun))


@cache
def value_in_jax(fun):
    return jax.jit(fun)


class Torch:
    """PyTorch, with parameters that ask for gradients, as a module's do."""

    xp = torch

    def __init__(self, dtype):
        self.dtype = dtype

    def array(self, values):
        return torch.tensor(np.asarray(values, self.dtype), requires_grad=True)

    def mode(self):
        return contextlib.nullcontext()

    def gradient(self, fun, *args):
        return torch.func.grad(fun)(*args)

    def value(self, fun, *args):
        return fun(*args)

    def call(self, clipped, *args, **kwargs):
        return clipped(*args, **kwargs)


KINDS = {f"jax-{d}-{'jit' if j else 'eager'}": Jax(d, j) for d in RTOL for j in (False, True)}
KINDS |= {f"torch-{d}": Torch(d) for d in RTOL}
FEW_KINDS = ["jax-float32-eager", "jax-float64-jit", "torch-float32", "torch-float64"]


@pytest.fixture(params=FEW_KINDS)
def kind(request):
    with KINDS[request.param].mode():
        yield KINDS[request.param]


def problem(kind, batch=BATCH):
    rng = np.random.default_rng(0)
    params = {"w": kind.array(rng.normal(size=(3, 2))), "b": kind.array([0.5, -1.0])}
    return params, kind.array(rng.normal(size=(batch, 3))), kind.array(rng.normal(size=(batch, 2)))


def loss(params, x, y):
    return (((x @ params["w"] + params["b"]) - y) ** 2).mean()


def loss_with_aux(params, x, y):
    out = x @ params["w"] + params["b"]
    return ((out - y) ** 2).mean(), {"out": out, "total": out.sum()}


def numbers(x):
    return np.asarray(x.detach() if isinstance(x, torch.Tensor) else x, np.float64)


def close(kind, actual, expected):
    """Compare trees; what is summed may cancel, so that the tolerance is relative to 1, too."""
    assert sorted(actual) == sorted(expected)
    for name in actual:
        assert str(actual[name].dtype).endswith(kind.dtype)
        np.testing.assert_allclose(numbers(actual[name]), expected[name], rtol=RTOL[kind.dtype], atol=RTOL[kind.dtype])


def naive(kind, params, x, y, max_norm, mask=None, layers=1):
    """Return the clipped sum and the norms, example by example, in float64."""
    total, norms = dict.fromkeys(params, 0.0), []
    for i in range(len(x)):
        grads = {k: numbers(g) for k, g in kind.gradient(loss, params, x[i : i + 1], y[i : i + 1]).items()}
        norm = {k: np.linalg.norm(g) for k, g in grads.items()}
        whole = math.hypot(*norm.values())
        used = norm if layers > 1 else dict.fromkeys(grads, whole)
        norms.append(whole)
        for name, grad in grads.items():
            scale = min(1.0, max_norm / math.sqrt(layers) / used[name])
            total[name] = total[name] + grad * (scale if mask is None or mask[i] else 0.0)
    return total, np.array(norms)


def cases():
    """Yield kinds, sizes and masks. In JAX each three of dtype, `jit`, size and mask meet, in half of the cases."""
    for name, (place, size), masked in product(KINDS, enumerate((None, 1, 2, 3, 7, 100)), (False, True)):
        if "jax" not in name or (place + masked + ("64" in name) + ("jit" in name)) % 2:
            yield name, size, masked


@pytest.mark.parametrize(("kind", "size", "masked"), list(cases()), indirect=["kind"])
def test_equals_the_naive_loop(kind, size, masked):
    params, x, y = problem(kind)
    mask = MASK if masked else None
    clipped = gradclip.clipped_grad(
        loss, 1.0, batch_argnums=(1, 2), microbatch_size=size, return_values=True, return_norms=True
    )
    summed, outputs = kind.call(clipped, params, x, y, mask=mask)
    expected, norms = naive(kind, params, x, y, 1.0, mask)
    close(kind, summed, expected)
    counted = MASK if masked else np.ones(BATCH)
    np.testing.assert_allclose(numbers(outputs.norms), norms * counted, rtol=RTOL[kind.dtype])
    values = [numbers(kind.value(loss, params, x[i : i + 1], y[i : i + 1])) for i in range(BATCH)]
    np.testing.assert_allclose(numbers(outputs.values), values * counted, rtol=RTOL[kind.dtype])
    assert outputs.aux is None
    assert not getattr(summed["w"], "requires_grad", False)


@pytest.mark.parametrize("size", [None, 3])
def test_layers_and_a_denominator(kind, size):
    params, x, y = problem(kind)
    clipped = gradclip.clipped_grad(
        loss, 1.0, batch_argnums=(1, 2), per_layer=True, normalize_by=4.0, microbatch_size=size, return_norms=True
    )
    summed, outputs = kind.call(clipped, params, x, y)
    expected, _ = naive(kind, params, x, y, 1.0, layers=2)
    close(kind, summed, {name: total / 4.0 for name, total in expected.items()})
    assert outputs.norms["w"].shape == (BATCH,)
    assert clipped.sensitivity("replace_one").bound == 0.5


@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize("keep", [False, True])
def test_auxiliary_results_of_each_example(kind, size, keep):
    params, x, y = problem(kind)
    clipped = gradclip.clipped_grad(
        loss_with_aux, 1.0, batch_argnums=(1, 2), has_aux=True, keep_batch_dim=keep, microbatch_size=size
    )
    summed, outputs = kind.call(clipped, params, x, y)
    close(kind, summed, naive(kind, params, x, y, 1.0)[0])
    out = numbers(x) @ numbers(params["w"]) + numbers(params["b"])
    np.testing.assert_allclose(numbers(outputs.aux["out"]), out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(numbers(outputs.aux["total"]), out.sum(1), rtol=1e-5, atol=1e-6)
    assert outputs.values is None
    assert outputs.norms is None


def test_several_parameters_share_a_norm(kind):
    params, x, y = problem(kind)

    def split(w, x, y, b):
        return loss({"w": w, "b": b}, x, y)

    clipped = gradclip.clipped_grad(split, 1.0, argnums=(3, 0), batch_argnums=[1, 2])
    for_b, for_w = kind.call(clipped, params["w"], x, y, params["b"])
    close(kind, {"w": for_w, "b": for_b}, naive(kind, params, x, y, 1.0)[0])


def test_the_batch_may_be_a_tree(kind):
    params, x, y = problem(kind)
    clipped = gradclip.clipped_grad(lambda p, batch: loss(p, batch["x"], batch["y"][0]), 1.0, microbatch_size=2)
    summed = kind.call(clipped, params, {"x": x, "y": (y, None)})
    close(kind, summed, naive(kind, params, x, y, 1.0)[0])


@pytest.mark.parametrize("size", [None, 2])
def test_groups_are_clipped_as_one(kind, size):
    """Three users with two examples each."""
    params, x, y = problem(kind, 6)
    xs, ys = x.reshape(3, 2, 3), y.reshape(3, 2, 2)
    clipped = gradclip.clipped_grad(
        loss, 0.5, batch_argnums=(1, 2), keep_batch_dim=False, microbatch_size=size, unit="group"
    )
    expected = {"w": 0.0, "b": 0.0}
    for i in range(3):
        grads = {k: numbers(g) for k, g in kind.gradient(loss, params, xs[i], ys[i]).items()}
        norm = math.hypot(*(np.linalg.norm(g) for g in grads.values()))
        expected = {k: expected[k] + min(1.0, 0.5 / norm) * g for k, g in grads.items()}
    close(kind, kind.call(clipped, params, xs, ys), expected)
    assert clipped.sensitivity().unit == "group"


@pytest.mark.parametrize("size", [None, 3])
def test_a_bad_example_contributes_exactly_zero(kind, size):
    params, x, y = problem(kind)
    bad = kind.array(np.where(np.arange(BATCH)[:, None] == 4, [[np.nan, np.inf, 1.0]], numbers(x)))
    clipped = gradclip.clipped_grad(loss, 1.0, batch_argnums=(1, 2), microbatch_size=size)
    with_bad = kind.call(clipped, params, bad, y)
    without = kind.call(clipped, params, x, y, mask=np.arange(BATCH) != 4)
    close(kind, with_bad, {name: numbers(leaf) for name, leaf in without.items()})
    alone = kind.call(clipped, params, bad[4:5], y[4:5])
    assert numbers(alone["w"]).tolist() == [[0.0, 0.0]] * 3


@pytest.mark.parametrize("size", [None, 3])
def test_a_batch_of_padding_and_an_empty_one(kind, size):
    params, x, y = problem(kind)
    clipped = gradclip.clipped_grad(loss, 1.0, batch_argnums=(1, 2), microbatch_size=size, return_norms=True)
    summed, outputs = kind.call(clipped, params, x * np.nan, y, mask=np.zeros(BATCH, bool))
    assert numbers(summed["w"]).tolist() == [[0.0, 0.0]] * 3
    assert numbers(outputs.norms).tolist() == [0.0] * BATCH
    summed, outputs = kind.call(clipped, params, x[:0], y[:0])
    assert numbers(summed["w"]).tolist() == [[0.0, 0.0]] * 3
    assert outputs.norms.shape == (0,)


def test_padded_microbatches_at_the_end_are_skipped():
    seen = []

    def counting(params, x):
        jax.debug.callback(lambda i: seen.append(int(i)), x[0, 0])
        return (params * x).sum()

    clipped = gradclip.clipped_grad(counting, 1.0, microbatch_size=2)
    mask = jnp.array([True, False, False, True, False, False, False])
    jax.block_until_ready(jax.jit(clipped)(jnp.ones(1), jnp.arange(7.0)[:, None], mask=mask))
    jax.effects_barrier()
    assert sorted(seen) == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [None, 2, 3])
def test_keys_are_split_for_each_example(size):
    def dropped(params, x, key):
        return (params * x * jax.random.bernoulli(key, shape=x.shape)).sum()

    key, x = jax.random.key(1), jnp.ones((BATCH, 5))
    clipped = gradclip.clipped_grad(dropped, 1.0, prng_argnum=2, microbatch_size=size)
    gradient = gradient_in_jax(dropped)
    grads = [np.asarray(gradient(x[0], x[0], one)) for one in jax.random.split(key, BATCH)]
    expected = sum(grad / max(1.0, np.linalg.norm(grad)) for grad in grads)
    np.testing.assert_allclose(jax.jit(clipped)(jnp.ones(5), x, key), expected, rtol=1e-6)
    assert len({tuple(g.tolist()) for g in grads}) > 1


def test_torch_draws_random_numbers_for_each_example():
    def dropped(params, x):
        return (params * torch.nn.functional.dropout(x)).sum()

    clipped = gradclip.clipped_grad(dropped, math.inf, microbatch_size=8)
    torch.manual_seed(0)
    kept = clipped(torch.ones(64), torch.ones(16, 64)) / 2.0
    assert 0.0 < kept.min() < kept.max() < 16.0


def test_a_torch_module():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    params = dict(model.named_parameters())

    def fun(params, x):
        return torch.func.functional_call(model, params, (x,)).square().sum()

    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)  # a loader's NumPy arrays
    summed = gradclip.clipped_grad(fun, math.inf, microbatch_size=2)(params, x)
    fun(params, torch.from_numpy(x)).backward()
    for name, parameter in params.items():
        torch.testing.assert_close(summed[name], parameter.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [None, 2])
def test_clipped_fun(kind, size):
    x = kind.array([[3.0, 4.0], [0.25, 0.5], [0.0, 2.0]])
    clipped = gradclip.clipped_fun(
        lambda rows: {"sum": rows.sum(0)}, 1.0, return_norms=True, microbatch_size=size, normalize_by=2.0
    )
    summed, outputs = kind.call(clipped, x)
    np.testing.assert_allclose(numbers(summed["sum"]), [0.425, 1.15], rtol=RTOL[kind.dtype])
    np.testing.assert_allclose(numbers(outputs.norms), [5.0, math.hypot(0.25, 0.5), 2.0], rtol=RTOL[kind.dtype])
    assert clipped.sensitivity("zero_out").bound == 0.5


def test_keyword_arguments_reach_the_function_as_they_are(kind):
    params, x, y = problem(kind)
    fun = lambda p, x, scale, *, y: scale * loss(p, x, y)
    clipped = gradclip.clipped_grad(fun, 1.0, batch_argnums=1, microbatch_size=2)
    summed = kind.call(clipped, params, x, 1.0, y=y[0])
    close(kind, summed, naive(kind, params, x, _repeated(kind, y[0]), 1.0)[0])


def _repeated(kind, row):
    return kind.array(np.tile(numbers(row), (BATCH, 1)))
