"""QuantileClip of the package autoclip: its signature, its numbers, its states."""

import copy
import inspect
import io
import math

import pytest
import torch

from gradclip.integrations.autoclip import QuantileClip, _rule

SIGNATURES = {
    QuantileClip: [("parameters", None), ("quantile", 0.9), ("history_length", 1000), ("global_threshold", False)],
    QuantileClip.as_optimizer: [
        ("optimizer", None),
        ("quantile", 0.9),
        ("history_length", 1000),
        ("global_threshold", False),
    ],
    QuantileClip.add_param_group: [
        ("self", None),
        ("parameter_group", None),
        ("quantile", None),
        ("history_length", None),
    ],
    QuantileClip.step: [("self", None)],
    QuantileClip.state_dict: [("self", None)],
    QuantileClip.load_state_dict: [("self", None), ("state_dict", None)],
}
"""Those of autoclip 0.2.1: names and defaults."""


def parameters(count=2):
    return [torch.nn.Parameter(torch.zeros(2)) for _ in range(count)]


def give(params, *norms):
    for parameter, norm in zip(params, norms, strict=True):
        parameter.grad = torch.tensor([0.6, 0.8]) * norm


def norms_of(params):
    return [pytest.approx(float(p.grad.norm()), rel=1e-6) for p in params]


@pytest.mark.parametrize(("function", "expected"), SIGNATURES.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_signatures_are_the_packages(function, expected):
    found = inspect.signature(function).parameters.values()
    assert [(p.name, None if p.default is p.empty else p.default) for p in found] == expected


def test_each_gradient_has_a_threshold_of_its_own():
    params = parameters()
    clipper = QuantileClip(iter(params), quantile=0.5)
    for norms, left in (((1.0, 10.0), (1.0, 10.0)), ((5.0, 5.0), (1.0, 5.0)), ((9.0, 9.0), (1.0, 5.0))):
        give(params, *norms)
        clipper.step()
        assert norms_of(params) == list(left)
    params[0].grad = None
    clipper.step()


def test_or_all_share_one():
    params = parameters()
    clipper = QuantileClip(params, quantile=1.0, global_threshold=True)
    for norms, left in (((3.0, 4.0), (3.0, 4.0)), ((30.0, 40.0), (3.0, 4.0)), ((0.3, 0.4), (0.3, 0.4))):
        give(params, *norms)
        clipper.step()
        assert norms_of(params) == list(left)


def test_nan_does_not_stay():
    params = parameters(1)
    clipper = QuantileClip(params)
    for norm in (1.0, math.nan, 1.0):
        give(params, norm)
        clipper.step()
    assert norms_of(params) == [1.0]


def test_groups_may_have_settings_of_their_own():
    one, two, three = parameters(3)
    clipper = QuantileClip([{"params": [one], "quantile": 0.0}, {"params": two}], quantile=1.0)
    clipper.add_param_group({"params": [three]}, quantile=0.0, history_length=1)
    for norm in (2.0, 4.0, 9.0):
        give([one, two, three], norm, norm, norm)
        clipper.step()
    assert norms_of([one, two, three]) == [2.0, 4.0, 4.0]
    assert [group["history_length"] for group in clipper.parameter_groups] == [1000, 1000, 1]


@pytest.mark.parametrize("together", [False, True])
def test_states_go_on(together):
    params, others = parameters(), parameters()
    first, second = (QuantileClip(p, quantile=0.3, global_threshold=together) for p in (params, others))
    for norm in (1.0, 2.0, 3.0):
        give(params, norm, 2 * norm)
        first.step()
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    for clipper, of in ((first, params), (second, others)):
        give(of, 100.0, 100.0)
        clipper.step()
    assert norms_of(params) == norms_of(others)


@pytest.mark.parametrize("together", [False, True])
def test_float64_norms_go_on_in_float64(together):
    norms = [1 + 2.0**-40, 3 + 2.0**-45, 2.0]
    params = [torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))]
    first = QuantileClip(params, quantile=0.0, global_threshold=together)
    for norm in norms:
        params[0].grad = torch.tensor([norm], dtype=torch.float64)
        first.step()
    state = first.state_dict()["state"]
    history = state["global_history"] if together else state[id(params[0])]["history"]
    assert history.tolist() == norms
    second = QuantileClip(params, quantile=0.0, global_threshold=together)
    second.load_state_dict(first.state_dict())
    params[0].grad = torch.tensor([7.0], dtype=torch.float64)
    second.step()
    assert norms[0] * (1 - 1e-14) <= params[0].grad.item() <= norms[0]


@pytest.mark.after_error
def test_a_state_that_cannot_be_read_changes_nothing():
    clipper = QuantileClip([{"params": parameters(1)}, {"params": parameters(1)}])
    good = clipper.state_dict()
    groups = [{**group, "quantile": 0.25} for group in good["param_groups"]]
    (key,) = groups[1]["params"]
    with pytest.raises(ValueError, match="could not convert"):
        clipper.load_state_dict({"state": {key: {"history": ["x"]}}, "param_groups": groups})
    assert clipper.state_dict() == good


def test_states_of_the_package_are_taken():
    """As autoclip 0.2.1 saves them: tensors by the id of each parameter, the oldest norm first."""
    params = parameters(2)
    saved = {"quantile": 0.5, "history_length": 2, "params": [11, 22]}
    clipper = QuantileClip(params)
    clipper.load_state_dict({"state": {11: {"history": torch.tensor([5.0, 1.0, 2.0])}}, "param_groups": [saved]})
    give(params, 9.0, 9.0)
    clipper.step()
    assert norms_of(params) == [1.0, 9.0]
    with pytest.raises(ValueError, match=r"groups of sizes \[2\], but this QuantileClip has \[1\]"):
        QuantileClip(parameters(1)).load_state_dict(clipper.state_dict())


def test_an_optimizer_that_clips_first():
    (weight,) = parameters(1)
    optimizer = QuantileClip.as_optimizer(torch.optim.SGD([weight], lr=1.0, momentum=0.9), quantile=0.5)
    for norm in (1.0, 50.0):
        give([weight], norm)
        optimizer.step()
    assert float(weight.detach().norm()) == pytest.approx(2.9, rel=1e-5)
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert isinstance(optimizer, torch.optim.Optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    assert set(state) == {"optimizer", "clipper"}
    optimizer.load_state_dict(state)
    optimizer.zero_grad(set_to_none=True)
    assert weight.grad is None
    (more,) = parameters(1)
    optimizer.add_param_group({"params": [more]}, quantile=1.0)
    assert len(optimizer.optimizer.param_groups) == len(optimizer.clipper.parameter_groups) == 2
    assert "SGD" in repr(optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_that_clips_first_gets_unscaled_gradients(fused):
    (weight,) = parameters(1)
    optimizer = QuantileClip.as_optimizer(torch.optim.SGD([weight], lr=1.0, fused=fused), quantile=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for norm in (1.0, math.inf, 50.0):
        optimizer.zero_grad(set_to_none=True)
        scaler.scale((weight * torch.tensor([0.6, 0.8]) * norm).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert float(weight.detach().norm()) == pytest.approx(2.0, rel=1e-5)
    assert scaler.get_scale() == 512.0


def test_gradients_of_a_closure_are_clipped():
    (weight,) = parameters(1)
    optimizer = QuantileClip.as_optimizer(torch.optim.SGD([weight], lr=1.0), quantile=0.5)
    for norm in (1.0, 50.0):

        def closure(norm=norm):
            give([weight], norm)
            return norm

        assert optimizer.step(closure) == norm
    assert float(weight.detach().norm()) == pytest.approx(2.0, rel=1e-5)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: QuantileClip([]), ValueError, "got no parameters"),
        (lambda: QuantileClip(3), TypeError, "iterable of tensors or dicts, got int"),
        (lambda: QuantileClip([3]), TypeError, "gradients of tensors, got int"),
        (lambda: QuantileClip(parameters(1) * 2), ValueError, "occurs twice"),
        (lambda: QuantileClip([parameters(1)[0] * 2]), ValueError, "computed from others"),
        (lambda: QuantileClip([{"params": set(parameters())}]), TypeError, "got a set"),
        (lambda: QuantileClip(parameters(), quantile=1.1), ValueError, "quantile must be"),
        (lambda: QuantileClip(parameters(), history_length=0), ValueError, "history_length must be"),
        (lambda: QuantileClip(parameters(), history_length=1.5), TypeError, "history_length must be a whole number"),
        (lambda: QuantileClip(parameters(), quantile="big"), TypeError, "quantile must be a number, got 'big'"),
    ],
)
def test_what_is_refused(make, kind, words):
    with pytest.raises(kind, match=words):
        make()


def test_a_quantile_may_be_a_tensor_as_in_the_package():
    rules = [_rule({"quantile": quantile, "history_length": 10}) for quantile in (0.75, torch.tensor(0.75))]
    assert rules[0] == rules[1]
