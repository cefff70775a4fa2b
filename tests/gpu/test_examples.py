"""Sums of clipped gradients of examples: by factors and by gradients that are made, beside autograd on the CPU."""

import math

import numpy as np
import pytest
import torch

import gradclip
from on_gpu import DEVICE, ON, drawn, moved, on_host
from rational import at_most

pytestmark = pytest.mark.gpu
COUNT, WIDTH, WORDS, STEPS = 12, 24, 50, 5
METHODS = ("ghost", "auto", "materialize", "loop")


@pytest.fixture(autouse=True)
def exact_products():
    """Convolutions and products of matrices in float32 proper, not in TF32."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dense(params, x, y):
    h = torch.tanh(x @ params["w"] + params["b"])
    return ((h @ params["v"] - y) ** 2).sum()


def words(params, x, y):
    """A table of words, a product over the steps of a sequence, and the table again."""
    h = torch.tanh(params["table"][x] @ params["w"])
    return torch.nn.functional.cross_entropy(h @ params["table"].T, y)


def attention(params, x, y):
    q, k, v = (x @ params["qkv"]).chunk(3, -1)
    mixed = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
    return ((mixed @ params["out"]).sum(0) * y).sum()


def convolution(params, x, y):
    h = torch.relu(torch.nn.functional.conv2d(x[None], params["kernel"], padding=1))
    return torch.nn.functional.cross_entropy(h.mean((2, 3)) @ params["w"], y[None])


SCALES = torch.logspace(-1, 1, COUNT)  # norms of examples differ: some are clipped
LOSSES = {
    "dense": (
        dense,
        {"w": normal(0, WIDTH, WIDTH) / 5, "b": normal(1, WIDTH), "v": normal(2, WIDTH, WIDTH) / 5},
        (normal(3, COUNT, WIDTH) * SCALES[:, None], normal(4, COUNT, WIDTH)),
    ),
    "words": (
        words,
        {"table": normal(5, WORDS, WIDTH), "w": normal(6, WIDTH, WIDTH) / 5},
        tuple(torch.randint(WORDS, (COUNT, STEPS), generator=torch.Generator().manual_seed(i)) for i in (7, 8)),
    ),
    "attention": (
        attention,
        {"qkv": normal(9, WIDTH, 3 * WIDTH) / 5, "out": normal(10, WIDTH, WIDTH) / 5},
        (normal(11, COUNT, STEPS, WIDTH), normal(12, COUNT, WIDTH) * SCALES[:, None]),
    ),
    "convolution": (
        convolution,
        {"kernel": normal(13, 6, 3, 3, 3), "w": normal(14, 6, 10)},
        (
            normal(15, COUNT, 3, 8, 8) * SCALES[:, None, None, None],
            torch.randint(10, (COUNT,), generator=torch.Generator().manual_seed(16)),
        ),
    ),
}


def gradients(loss, params, *batch):
    """Return the gradients of each example on the CPU in float64, by autograd on that example alone."""
    own = {name: x.double().requires_grad_() for name, x in params.items()}
    made = []
    for example in zip(*batch, strict=True):
        example = [x.double() if x.is_floating_point() else x for x in example]
        made.append(dict(zip(own, torch.autograd.grad(loss(own, *example), list(own.values())), strict=True)))
    return made


def summed(made, max_norm):
    """Clip each by hand and add them up; return the sums and the norms."""
    norms = [math.sqrt(sum(float((g**2).sum()) for g in one.values())) for one in made]
    factors = [min(1.0, max_norm / norm) for norm in norms]
    return {name: sum(c * g[name] for c, g in zip(factors, made, strict=True)).numpy() for name in made[0]}, norms


def threshold_of(norms):
    return sorted(norms)[COUNT // 2] * 1.01


def place(params, batch):
    return dict(zip(params, moved(params.values()), strict=True)), moved(batch)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        (name, method)
        for name in LOSSES
        for method in METHODS
        if (name, method) not in (("convolution", "ghost"), ("attention", "loop"))
    ],
)
def test_the_sum_of_a_loss(name, method):
    loss, params, batch = LOSSES[name]
    made = gradients(loss, params, *batch)
    max_norm = threshold_of(summed(made, 1.0)[1])
    wanted, norms = summed(made, max_norm)
    clipped = gradclip.clipped_grad(
        loss, max_norm, batch_argnums=(1, 2), method=method, pad_to=COUNT, return_norms=True, keep_batch_dim=False
    )
    there, there_batch = place(params, batch)
    found, outputs = clipped(there, *there_batch)
    np.testing.assert_allclose(on_host([outputs.norms])[0], norms, rtol=1e-4)
    for key, value in found.items():
        assert value.device.type == DEVICE.type
        np.testing.assert_allclose(on_host([value])[0], wanted[key], rtol=1e-3, atol=1e-4 * np.abs(wanted[key]).max())


def test_a_module_and_labels():
    """The loss of a network called by its parameters, as the page on private training has it."""
    torch.manual_seed(0)
    host = torch.nn.Sequential(torch.nn.Linear(WIDTH, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    x, y = normal(20, COUNT, WIDTH), torch.arange(COUNT) % 10

    def loss_with(network):
        def loss(parameters, x, y):
            return torch.nn.functional.cross_entropy(torch.func.functional_call(network, parameters, (x,)), y)

        return loss

    params = {name: p.detach().clone() for name, p in host.named_parameters()}
    made = gradients(loss_with(host), params, x, y)
    max_norm = threshold_of(summed(made, 1.0)[1])
    wanted, _ = summed(made, max_norm)
    network = host.to(DEVICE)
    for method in ("auto", "ghost"):
        clipped = gradclip.clipped_grad(loss_with(network), max_norm, batch_argnums=(1, 2), method=method, pad_to=COUNT)
        found = clipped(dict(network.named_parameters()), *moved([x, y]))
        for key, value in found.items():
            np.testing.assert_allclose(on_host([value])[0], wanted[key], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", ["ghost", "materialize"])
def test_one_example_keeps_what_is_promised(method):
    """Alone in the batch, an example moves the sum from zero to what it adds."""
    loss, params, batch = LOSSES["dense"]
    clipped = gradclip.clipped_grad(loss, 0.1, batch_argnums=(1, 2), method=method, pad_to=COUNT)
    there, there_batch = place(params, batch)
    for i in (0, COUNT - 1):
        mask = torch.arange(COUNT) == i
        found = clipped(there, *there_batch, mask=moved([mask])[0])
        results = on_host(found.values())
        assert at_most(results, 2, clipped.sensitivity().total)
        assert float(gradclip.global_norm(list(found.values()))) == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("method", ["ghost", "materialize"])
def test_padding_counts_for_nothing(method):
    loss, params, (x, y) = LOSSES["dense"]
    clipped = gradclip.clipped_grad(loss, 1.0, batch_argnums=(1, 2), method=method, pad_to=COUNT)
    mask = torch.arange(COUNT) % 3 > 0
    there, (x_there, y_there, mask_there) = place(params, (x, y, mask))
    found = on_host(clipped(there, x_there, y_there, mask=mask_there).values())
    x_there[~mask_there] = math.nan
    again = on_host(clipped(there, x_there, y_there, mask=mask_there).values())
    for one, other in zip(found, again, strict=True):
        np.testing.assert_array_equal(one, other)
    made = gradients(loss, params, x[mask], y[mask])
    for key, value in zip(params, found, strict=True):
        np.testing.assert_allclose(value, summed(made, 1.0)[0][key], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("settings", [{}, {"per_layer": True}, {"rule": "normalize"}, {"grid": 2**12}], ids=str)
def test_gradients_that_are_there(dtype, settings):
    leaves, there = drawn(80, (dtype,), [(20, 30), (20, 4, 5), (20,)])
    there[0][3, 7] = leaves[0][3, 7] = math.nan
    found, info = gradclip.per_example_clip(there, 4.0, **settings)
    wanted, told = gradclip.per_example_clip([x.double() for x in leaves], 4.0, **settings)
    counts = info.num_clipped if isinstance(info.num_clipped, list) else [info.num_clipped]
    known = told.num_clipped if isinstance(told.num_clipped, list) else [told.num_clipped]
    assert list(map(int, counts)) == list(map(int, known))
    for x, y in zip(on_host(found), on_host(wanted), strict=True):
        assert np.isfinite(x).all()
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=20 if "grid" in settings else 1e-4)
    assert "grid" in settings or any(x.any() for x in on_host(found))


def test_each_example_by_hand():
    (rows,) = moved([torch.tensor([[3.0, 4.0], [0.3, 0.4], [math.nan, 1.0]])])
    with ON.waiting_is_an_error():
        found, info = gradclip.per_example_clip(rows, 1.0)
    np.testing.assert_allclose(on_host([found])[0], [0.9, 1.2], rtol=1e-6)
    assert int(info.num_clipped) == 1
    np.testing.assert_allclose(on_host([info.norms])[0], [5.0, 0.5, math.nan], rtol=1e-6)
