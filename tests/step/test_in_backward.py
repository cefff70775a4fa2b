"""Each gradient is clipped as the backward pass finishes it; the norm of all stays within the threshold."""

import math

import numpy as np
import pytest
import torch

import gradclip
from gradclip.integrations.torch import clip_in_backward
from rational import at_most


def model():
    """Return y = v.a + w.b, of which the gradients are a and b."""
    return torch.nn.ParameterDict({"v": torch.zeros(2), "w": torch.zeros(6)})


def backward(params, v=(3.0, 4.0), w=(6.0, 8.0, 0.0, 0.0, 0.0, 0.0)):
    (params["v"] @ torch.tensor(v) + params["w"] @ torch.tensor(w)).backward()


def step_in_backward(params):
    """Make each parameter's own optimizer step as soon as its gradient is there, and free the gradient."""
    optimizers = {id(p): torch.optim.SGD([p], lr=1.0) for p in params.values()}

    def step(parameter):
        optimizers[id(parameter)].step()
        optimizers[id(parameter)].zero_grad()

    for p in params.values():
        p.register_post_accumulate_grad_hook(step)


def test_shares_follow_the_numbers_of_elements():
    params = model()
    clipping = clip_in_backward(params, 1.0)
    backward(params)
    assert clipping.thresholds == pytest.approx({"v": 0.5, "w": math.sqrt(0.75)})
    torch.testing.assert_close(params["v"].grad, torch.tensor([0.3, 0.4]))
    torch.testing.assert_close(params["w"].grad[:2], math.sqrt(0.75) * torch.tensor([0.6, 0.8]))
    assert clipping.norms == {"v": torch.tensor(5.0), "w": torch.tensor(10.0)}


def test_thresholds_by_name():
    params = model()
    clip_in_backward(params, {"v": 1.0, "w": math.inf})
    backward(params)
    torch.testing.assert_close(params["v"].grad, torch.tensor([0.6, 0.8]))
    assert params["w"].grad[:2].tolist() == [6.0, 8.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("ord", [1, 2, 3, math.inf])
@pytest.mark.parametrize("special", [None, math.nan])
def test_each_gradient_gets_the_bits_of_a_call_for_it_alone(dtype, ord, special):
    given = torch.randn(65, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    given[7] = given[7] if special is None else special
    thresholds = {"clipped": 0.5, "kept": 1e4}
    params = {name: torch.nn.Parameter(torch.zeros_like(given)) for name in thresholds}
    clipping = clip_in_backward(params, thresholds, ord=ord, nonfinite="zero")
    torch.autograd.backward([(p * given.conj()).sum().real for p in params.values()])
    for name, p in params.items():
        alone = torch.nn.Parameter(torch.zeros_like(given))
        alone.grad = given.clone()
        norm = gradclip.clip_grad_norm_([alone], thresholds[name], ord, nonfinite="zero")
        assert torch.equal(clipping.norms[name], norm)
        assert torch.equal(p.grad, alone.grad)


def test_what_is_not_clipped_keeps_its_bits():
    params = model()
    clip_in_backward(params, {"v": 5.0, "w": 10.0})
    backward(params)
    assert params["v"].grad.tolist() == [3.0, 4.0]
    assert params["w"].grad[:2].tolist() == [6.0, 8.0]


def test_before_optimizers_that_step_in_the_backward_pass():
    params = model()
    clip_in_backward(params, 1.0)
    step_in_backward(params)
    backward(params)
    assert params["v"].grad is None
    torch.testing.assert_close(params["v"].detach(), torch.tensor([-0.3, -0.4]))
    assert at_most([p.detach().numpy() for p in params.values()], 2, 1.0)


def test_after_them_it_is_refused():
    params = model()
    step_in_backward(params)
    with pytest.raises(ValueError, match="v already has hooks that run after its gradient is accumulated"):
        clip_in_backward(params, 1.0)


def test_remove_ends_it():
    params = model()
    clipping = clip_in_backward(params, 1.0)
    clipping.remove()
    backward(params)
    assert params["v"].grad.tolist() == [3.0, 4.0]
    clip_in_backward(params, 1.0).remove()


def test_accumulated_gradients_are_clipped_at_each_pass():
    params = model()
    clipping = clip_in_backward(params, {"v": 1.0, "w": 1.0})
    backward(params)
    backward(params, v=(0.0, 1.0))
    assert clipping.norms["v"].item() == pytest.approx(math.hypot(0.6, 1.8))
    assert at_most([params["v"].grad.numpy()], 2, 1.0)


@pytest.mark.parametrize("ord", [1, 2, 3, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_the_norm_of_all_is_at_most_the_threshold_exactly(dtype, ord):
    rng = np.random.default_rng(0)
    for _ in range(12):
        sizes = rng.integers(1, 40, size=4)
        values = [
            torch.from_numpy(rng.standard_normal(size) * 10.0 ** rng.uniform(-3, 3, size)).to(dtype) for size in sizes
        ]
        params = [torch.nn.Parameter(torch.zeros_like(value)) for value in values]
        threshold = 10.0 ** rng.uniform(-2, 4)
        clip_in_backward(params, threshold, ord=ord)
        sum((p * value).sum() for p, value in zip(params, values, strict=True)).backward()
        assert at_most([p.grad.double().numpy() for p in params], ord, threshold)


def test_a_single_parameter_has_all():
    weight = torch.nn.Parameter(torch.zeros(2))
    clip_in_backward(weight, 5.0)
    (weight @ torch.tensor([3.0, 4.0])).backward()
    assert weight.grad.tolist() == [3.0, 4.0]


def test_frozen_parameters_have_no_share():
    params = model()
    params["w"].requires_grad_(False)
    clipping = clip_in_backward(params, 1.0)
    assert clipping.thresholds == {"v": 1.0}


def test_tied_parameters_count_and_are_clipped_once():
    tied = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    tied[1].weight = tied[0].weight
    for given in (tied, list(tied.named_parameters(remove_duplicate=False))):
        clipping = clip_in_backward(given, 1.0)
        assert clipping.thresholds == {"0.weight": 1.0}
        tied.zero_grad()
        tied(torch.tensor([[30.0, 40.0]])).sum().backward()
        assert gradclip.grad_norm(tied.parameters()).item() == pytest.approx(1.0)
        clipping.remove()


def test_each_of_the_parameters_with_one_name_is_clipped():
    """The names of two models, one after the other."""
    given = [(name, torch.nn.Parameter(torch.zeros(2))) for name in ("w", "b", "w", "w (2)", "w")]
    names = ["w", "b", "w (2)", "w (2) (2)", "w (3)"]
    values = torch.tensor([3.0, 4.0])
    for max_norm in (1.0, {name: math.sqrt(0.2) for name in names}):
        clipping = clip_in_backward(iter(given), max_norm)
        sum((p @ values) * 10**k for k, (_, p) in enumerate(given)).backward()
        assert list(clipping.thresholds) == names
        assert clipping.norms == {name: torch.tensor(5.0 * 10**k) for k, name in enumerate(names)}
        assert gradclip.grad_norm([p for _, p in given]).item() == pytest.approx(1.0)
        clipping.remove()
        for _, p in given:
            p.grad = None


def test_thresholds_for_a_name_that_occurs_twice():
    given = [("w", torch.nn.Parameter(torch.zeros(2))) for _ in range(2)]
    with pytest.raises(ValueError, match=r"no pattern of max_norm matches w \(2\)"):
        clip_in_backward(given, {"w": 1.0})


@pytest.mark.parametrize(("policy", "v"), [("propagate", [math.nan] * 2), ("drop", [0.0, 0.0]), ("zero", [0.0, 2.0])])
def test_each_gradient_has_its_own_policy(policy, v):
    params = model()
    clip_in_backward(params, {"v": 2.0, "w": 1.0}, nonfinite=policy)
    backward(params, v=(math.nan, 4.0))
    torch.testing.assert_close(params["v"].grad, torch.tensor(v), equal_nan=True)
    torch.testing.assert_close(params["w"].grad[:2], torch.tensor([0.6, 0.8]))


def test_raised_from_the_backward_pass_by_name():
    params = model()
    clip_in_backward(params, 1.0, nonfinite="raise")
    with pytest.raises(FloatingPointError, match=r"v\.grad: 1 NaN"):
        backward(params, v=(math.nan, 4.0))


@pytest.mark.after_error
@pytest.mark.parametrize(
    ("max_norm", "message"),
    [
        ({"v": 1.0}, "no pattern of max_norm matches w"),
        ({"v": 1.0, "w": 1.0, "u": 1.0}, "the pattern 'u' of max_norm matches no name"),
        ({"*": 1.0, "w": 1.0}, "the pattern 'w' of max_norm gets no parameter"),
        ({"v": 1.0, "w": -1.0}, r"max_norm\['w'\] must not be negative"),
        (math.nan, "max_norm must not be negative or NaN"),
        (torch.tensor(-1.0), "max_norm must not be negative or NaN"),
    ],
)
def test_thresholds_are_checked(max_norm, message):
    params = model()
    with pytest.raises(ValueError, match=message):
        clip_in_backward(params, max_norm)
    backward(params)
    assert params["v"].grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: [torch.zeros(2)], "no parameter requires a gradient"),
        (lambda: {"w": torch.zeros(2, requires_grad=True) * 2}, "w is computed from other tensors"),
        (lambda: iter(()), "yields nothing"),
    ],
)
def test_parameters_that_get_no_gradients(given, message):
    with pytest.raises(ValueError, match=message):
        clip_in_backward(given(), 1.0)


def test_what_is_no_tensor():
    with pytest.raises(TypeError, match=r"parameters\[0\] is of type str"):
        clip_in_backward(["w"], 1.0)


def test_thresholds_by_name_need_names():
    with pytest.raises(TypeError, match=r"Pass the model, or model.named_parameters\(\)"):
        clip_in_backward(list(model().values()), {"v": 1.0})


@pytest.mark.parametrize("arguments", [{"ord": -math.inf}, {"ord": 0.5}, {"nonfinite": "skip"}])
def test_other_arguments_are_checked(arguments):
    with pytest.raises(ValueError, match=f"{next(iter(arguments))} must"):
        clip_in_backward(model(), 1.0, **arguments)


def test_gradients_of_gradients_are_refused():
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    clip_in_backward([weight], 1.0)
    with pytest.raises(RuntimeError, match=r"create_graph=True.*remove\(\)"):
        (weight**2).sum().backward(create_graph=True)


def test_only_chosen_parameters_are_clipped_and_share_the_threshold():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    clipping = clip_in_backward(net, 1e-3, where="*.weight")
    net(torch.ones(1, 2)).sum().backward()
    assert clipping.thresholds == pytest.approx({"0.weight": math.sqrt(0.5) * 1e-3, "1.weight": math.sqrt(0.5) * 1e-3})
    assert gradclip.grad_norm(net.named_parameters(), where="*.weight").item() == pytest.approx(1e-3)
    assert net[1].bias.grad.tolist() == [1.0, 1.0]
    net[1].bias = torch.nn.Parameter(torch.zeros(2))  # does not count either
    net(torch.ones(1, 2))
    net[1].weight = torch.nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(RuntimeError, match=r"1\.weight: added or replaced since"):
        net(torch.ones(1, 2))


def test_a_tied_parameter_counts_if_one_of_its_names_is_chosen():
    tied = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    tied[1].weight = tied[0].weight
    clipping = clip_in_backward(tied, 1.0, where="1.*")
    tied(torch.tensor([[30.0, 40.0]])).sum().backward()
    assert clipping.thresholds == {"0.weight": 1.0}


@pytest.mark.after_error
@pytest.mark.parametrize(
    ("given", "settings", "error", "message"),
    [
        (model(), {"where": "x*"}, ValueError, "where chooses none of the names"),
        (model(), {"where": ["v", "x*"]}, ValueError, "'x*', which matches none of the names"),
        (model(), {"where": 3}, TypeError, "where must be a pattern"),
        (list(model().values()), {"where": "v"}, ValueError, "name"),
        (
            model(),
            {"where": "v", "max_norm": {"v": 1.0, "w": 1.0}},
            ValueError,
            "pattern 'w' of max_norm matches no name",
        ),
        (model(), {"integers": "raise"}, TypeError, "a backward pass makes no gradients of integers"),
    ],
)
def test_a_choice_is_checked(given, settings, error, message):
    with pytest.raises(error, match=message.replace("*", r"\*")):
        clip_in_backward(given, **{"max_norm": 1.0, **settings})


def test_integers_beside_the_parameters_are_left_out():
    params = {"v": torch.nn.Parameter(torch.zeros(2)), "n": torch.nn.Parameter(torch.zeros(2, dtype=int), False)}
    clipping = clip_in_backward(params, 5.0)
    (params["v"] @ torch.tensor([3.0, 4.0])).backward()
    assert clipping.thresholds == {"v": 5.0}
