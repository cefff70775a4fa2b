"""Opacus' optimizers with gradclip's sums. Bounds are judged with whole numbers, noise by draws made again."""

import math
import warnings

import pytest
import torch
from opacus import optimizers as originals

import gradclip
from gradclip.integrations.opacus import AdaClipDPOptimizer, DPOptimizer, DPPerLayerOptimizer
from rational import at_most

SHAPES = [(10,), (5, 3)]
ADAPTIVE = {
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 10.0,
    "min_clipbound": 0.1,
    "unclipped_num_std": 1e-9,
}


def made(kind, shapes=SHAPES, max_grad_norm=1.0, dtype=torch.float32, **settings):
    """Return an optimizer of `kind` of rate 1, over parameters of zeros, whose gradients are sums."""
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    settings = {"noise_multiplier": 0.0, "expected_batch_size": None, "loss_reduction": "sum"} | settings
    return kind(torch.optim.SGD(parameters, lr=1.0), max_grad_norm=max_grad_norm, **settings)


def backward(optimizer, samples):
    for p, sample in zip(optimizer.params, samples, strict=True):
        p.grad_sample = sample.clone() if isinstance(sample, torch.Tensor) else sample


def stepped(optimizer, *batches):
    """Return the gradients of one step over virtual batches."""
    for samples in batches:
        optimizer.zero_grad()
        optimizer.signal_skip_step(samples is not batches[-1])
        backward(optimizer, samples)
        optimizer.step()
    return [p.grad.clone() for p in optimizer.params]


def draws(examples, scale=1.0, shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(examples, *shape, generator=generator) for shape in shapes]


def numbers(tensors):
    return [x.double().numpy() for x in tensors]


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_one_example_moves_the_sum_and_the_gradient_by_at_most_the_threshold(scale):
    for seed in range(200):
        optimizer, samples = made(DPOptimizer), draws(1, scale, seed=seed)
        stepped(optimizer, samples)
        for found in ([p.summed_grad for p in optimizer.params], [p.grad for p in optimizer.params]):
            assert at_most(numbers(found), 2, 1.0)
            assert math.sqrt(sum((x**2).sum() for x in numbers(found))) > 1 - 1e-6


def test_float32_sums_would_break_the_bound():
    """Why sums are float64: the same examples, clipped as exactly, but rounded to float32 to nearest."""
    found = [gradclip.per_example_clip(draws(1, seed=seed), 1.0)[0] for seed in range(200)]
    assert 60 < sum(not at_most(numbers(sums), 2, 1.0) for sums in found) < 140


def test_opacus_breaks_the_bound_where_its_epsilon_is_lost():
    sums = []
    for seed in range(200):
        optimizer = made(originals.DPOptimizer)
        stepped(optimizer, draws(1, 1e4, seed=seed))
        sums.append(numbers(p.summed_grad for p in optimizer.params))
    assert sum(not at_most(each, 2, 1.0) for each in sums) > 40


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_keep_the_bound(dtype):
    for seed in range(50):
        optimizer = made(DPOptimizer, dtype=dtype)
        grads = stepped(optimizer, [x.to(dtype) for x in draws(1, 3.0, seed=seed)])
        assert {x.dtype for x in grads} == {dtype}
        assert at_most(numbers(grads), 2, 1.0)


def test_complex_parameters_keep_the_bound_and_get_noise_in_both_parts():
    """Opacus' noise has that standard deviation over both parts together, too little by the root of 2 in each."""
    samples = [torch.complex(*draws(2, shapes=[shape])[0]).unsqueeze(0) for shape in SHAPES]
    parts = [torch.view_as_real(x) for x in stepped(made(DPOptimizer, dtype=torch.complex64), samples)]
    assert at_most(numbers(parts), 2, 1.0)
    assert not at_most(numbers(parts), 2, 1.0 - 1e-5)
    zeros = [torch.zeros(1, 40000, dtype=torch.complex64)]
    settings = {"noise_multiplier": 2.0, "max_grad_norm": 1.5, "dtype": torch.complex64}
    ours, theirs = (
        stepped(made(kind, [(40000,)], generator=torch.Generator().manual_seed(0), **settings), zeros)[0]
        for kind in (DPOptimizer, originals.DPOptimizer)
    )
    for found, std in ((ours, 3.0), (theirs, 3.0 / math.sqrt(2))):
        for part in (found.real, found.imag):
            assert float(part.std()) == pytest.approx(std, rel=0.02)
        assert abs(float((found.real * found.imag).mean())) < 0.2


def test_large_gradients_are_clipped_and_not_dropped():
    samples = [torch.tensor([[3e30, 4e30], [3e-30, 4e-30]])]
    (ours,) = stepped(made(DPOptimizer, [(2,)]), samples)
    (theirs,) = stepped(made(originals.DPOptimizer, [(2,)]), samples)
    torch.testing.assert_close(ours, torch.tensor([0.6, 0.8]), rtol=1e-6, atol=0.0)
    assert theirs.abs().max() < 1e-29
    finite = [torch.full((1, 16), 3e38)]  # a norm of 1.2e39, beyond float32
    optimizer = made(DPOptimizer, [(16,)])
    torch.testing.assert_close(stepped(optimizer, finite)[0], torch.full((16,), 0.25), rtol=1e-6, atol=0.0)
    assert optimizer.num_nonfinite == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", [DPOptimizer, DPPerLayerOptimizer, AdaClipDPOptimizer])
def test_examples_that_are_not_finite_add_nothing_and_are_counted(bad, kind):
    settings = ADAPTIVE if kind is AdaClipDPOptimizer else {}
    optimizer = made(kind, [(2,), (1,)], [1.0, 1.0] if kind is DPPerLayerOptimizer else 1.0, **settings)
    samples = [torch.tensor([[bad, 0.0], [0.25, 0.5]]), torch.tensor([[0.125], [0.5]])]
    with pytest.warns(UserWarning, match="1 of 2 examples have gradients with NaN or infinities. They add nothing"):
        grads = stepped(optimizer, samples)
    expected = [0.25, 0.5, 0.5 if kind is not DPPerLayerOptimizer else 0.625]
    assert torch.cat(grads).tolist() == expected
    assert optimizer.num_nonfinite == 1


def test_0d_and_empty_parameters_count_with_the_others():
    optimizer = made(DPOptimizer, [(), (0,), (1,)])
    samples = [torch.tensor([3.0, math.nan]), torch.zeros(2, 0), torch.tensor([[4.0], [1.0]])]
    with pytest.warns(UserWarning, match="1 of 2 examples"):
        scale, _, weight = stepped(optimizer, samples)
    torch.testing.assert_close([scale, weight], [torch.tensor(0.6), torch.tensor([0.8])])


@pytest.mark.parametrize("kind", [DPOptimizer, DPPerLayerOptimizer, AdaClipDPOptimizer])
def test_empty_batches_give_noise_alone(kind):
    settings = ADAPTIVE | {"unclipped_num_std": 1.0} if kind is AdaClipDPOptimizer else {}
    thresholds = [1.0, 1.0] if kind is DPPerLayerOptimizer else 1.0
    for noise in (0.0, 1.0):
        optimizer = made(kind, max_grad_norm=thresholds, noise_multiplier=noise, expected_batch_size=4, **settings)
        grads = stepped(optimizer, [torch.zeros(0, *shape) for shape in SHAPES])
        assert [x.shape for x in grads] == [torch.Size(shape) for shape in SHAPES]
        assert all(bool(x.ne(0).all()) == bool(noise) for x in grads)
        assert math.isfinite(optimizer.max_grad_norm)


def test_virtual_steps_add_up_in_float64():
    first, second = draws(3), draws(5, seed=1)
    whole = [torch.cat(pair) for pair in zip(first, second, strict=True)]
    optimizer = made(DPOptimizer)
    parts = stepped(optimizer, first, second)
    assert {p.summed_grad.dtype for p in optimizer.params} == {torch.float64}
    expected = gradclip.per_example_clip([x.double() for x in whole], 1.0)[0]
    for x, y in zip(parts, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2.0**-23, atol=0.0)
    torch.testing.assert_close(stepped(optimizer, whole), parts, rtol=0.0, atol=2.0**-23)


def test_accumulated_batches_are_divided_by_their_number():
    first, second = draws(4), draws(4, seed=1)
    optimizer = made(DPOptimizer, loss_reduction="mean", expected_batch_size=4)
    backward(optimizer, [list(pair) for pair in zip(first, second, strict=True)])
    optimizer.pre_step()
    whole = [torch.cat(pair).double() for pair in zip(first, second, strict=True)]
    for p, total in zip(optimizer.params, gradclip.per_example_clip(whole, 1.0)[0], strict=True):
        torch.testing.assert_close(p.grad.double(), total / 8, rtol=2.0**-23, atol=0.0)


@pytest.mark.parametrize("secure", [False, True])
def test_noise_is_drawn_in_float64_from_opacus_generator(secure):
    generator = torch.Generator().manual_seed(7)
    optimizer = made(
        DPOptimizer, [(5,)], 0.5, noise_multiplier=2.0, expected_batch_size=8, generator=generator, secure_mode=secure
    )
    (grad,) = stepped(optimizer, [torch.zeros(8, 5)])
    promised = gradclip.clipped_sum_sensitivity(
        0.5,
        batch_size=4 * 8 + 1024,
        layout=gradclip.SumLayout(partial_sums=4 * 8 + 1024, elements=5),
        sum_dtype="float64",
    )
    again = torch.Generator().manual_seed(7)

    def draw(size):
        return torch.normal(0.0, promised.noise_std(2.0), size, generator=again, dtype=torch.float64)

    if secure:
        draw((1, 1))
    expected = sum(draw((5,)) for _ in range(4)) / 2 if secure else draw((5,))
    torch.testing.assert_close(grad, expected.float(), rtol=2.0**-24, atol=0.0)
    assert 1.0 < promised.noise_std(2.0) < 1.0 + 1e-8


def test_noise_covers_batches_larger_than_expected():
    optimizer = made(DPOptimizer, [(1,)], noise_multiplier=1.0, expected_batch_size=1)
    usual = optimizer._std(1)
    stepped(optimizer, [torch.zeros(1028, 1)])
    assert optimizer._std(1) == usual  # 4 * 1 + 1024
    stepped(optimizer, [torch.zeros(1000, 1)], [torch.zeros(29, 1)])
    assert optimizer._std(1) > usual
    optimizer.zero_grad()
    assert optimizer._std(1) == usual


def test_layers_are_clipped_alone_and_noise_is_for_all_of_them():
    optimizer = made(DPPerLayerOptimizer, [(2,), (1,)], [3.0, 4.0], noise_multiplier=1.0)
    assert optimizer._std(0) == pytest.approx(5.0, rel=1e-8)
    assert optimizer._std(0) > 5.0
    optimizer.max_grad_norm = 0.001  # a scheduler's change reaches neither thresholds nor noise
    assert optimizer._std(0) > 5.0
    optimizer.noise_multiplier = 0.0
    weight, bias = stepped(optimizer, [torch.tensor([[6.0, 8.0]]), torch.tensor([[2.0]])])
    torch.testing.assert_close(weight, torch.tensor([1.8, 2.4]))
    assert bias.tolist() == [2.0]


def test_the_adaptive_threshold_follows_the_quantile():
    norms = torch.linspace(0.5, 8.0, 64).reshape(-1, 1)
    for initial in (0.1, 10.0):
        optimizer = made(AdaClipDPOptimizer, [(1,)], initial, expected_batch_size=64, **ADAPTIVE)
        for _ in range(100):
            stepped(optimizer, [norms[:40]], [norms[40:]])
        assert float(norms[31]) * 0.98 < optimizer.max_grad_norm < float(norms[32]) * 1.02


def test_the_adaptive_rule_is_that_of_opacus_for_batches_of_the_expected_size():
    found = []
    for kind in (AdaClipDPOptimizer, originals.AdaClipDPOptimizer):
        optimizer = made(kind, [(1,)], 2.0, expected_batch_size=4, **ADAPTIVE)
        stepped(optimizer, [torch.tensor([[1.0], [3.0], [4.0], [5.0]])])
        found.append(float(optimizer.max_grad_norm))
    assert found[0] == pytest.approx(2.0 * math.exp(0.2 * 0.25), rel=1e-8)
    assert found == pytest.approx([found[0]] * 2, rel=1e-6)


def test_the_adaptive_noise_pays_for_the_count():
    settings = ADAPTIVE | {"unclipped_num_std": 5.0}
    optimizer = made(AdaClipDPOptimizer, [(1,)], 2.0, noise_multiplier=1.0, expected_batch_size=4, **settings)
    assert optimizer._std(4) == pytest.approx(2.0 / math.sqrt(1 - 0.01), rel=1e-8)
    assert optimizer.noise_multiplier == 1.0


@pytest.mark.after_error
def test_gradients_that_were_used_are_refused():
    optimizer = made(DPOptimizer)
    backward(optimizer, draws(2))
    optimizer.step()
    before = [p.summed_grad.clone() for p in optimizer.params]
    with pytest.raises(ValueError, match="cleared since the last optimizer step"):
        optimizer.step()
    assert all(torch.equal(p.summed_grad, x) for p, x in zip(optimizer.params, before, strict=True))


def test_thresholds_are_checked_when_the_optimizer_is_made():
    with pytest.raises(ValueError, match=r"max_grad_norm must not be negative or NaN, got -1\.0"):
        made(DPOptimizer, max_grad_norm=-1.0)
    with pytest.raises(ValueError, match="max_grad_norm must be finite, or no noise can hide one example"):
        made(DPOptimizer, max_grad_norm=math.inf, noise_multiplier=1.0)
    made(DPOptimizer, max_grad_norm=math.inf)


def test_ordinary_steps_warn_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stepped(made(DPOptimizer), draws(4))
