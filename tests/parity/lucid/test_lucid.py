"""Side by side with `lucid.nn.util`: real Lucid parameters, whose gradients are NumPy arrays, through both."""

import math

import lucid
import numpy as np
import pytest
from lucid import nn, optim
from lucid.nn import util as peer

from gradclip.integrations import lucid as ours
from parity_support import (
    ULP,
    arguments,
    assert_just_below,
    assert_matches,
    count_of,
    gradients,
    plain_sum_ulps,
    reference_norm,
    tolerance,
)

DTYPES = {"float16": np.float16, "float32": np.float32, "float64": np.float64}
NAMES = ("grad_norm", "clip_grad_norm", "clip_grad_value")
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
both_sizes = pytest.mark.parametrize("large", [False, True], ids=["small", "large"])


def parameters(leaves):
    """Return Lucid parameters with copies of the leaves, in the same layout, for gradients; and one without."""
    made = []
    for leaf in leaves:
        made.append(nn.Parameter(np.zeros(leaf.shape)))
        made[-1].grad = leaf.copy(order="K")
    return [*made, nn.Parameter(np.zeros(2))]


def some_leaves(dtype, large=False):
    return list(gradients(DTYPES[dtype], large=large).values())


def peer_ulps(count, norm_type=2):
    """The norm of a leaf is taken in its dtype, those of the leaves are combined in float64; the product is rounded."""
    return 3.0 + plain_sum_ulps(count, norm_type)


def clipped(clip, leaves, *args, **kwargs):
    """Return the gradients after `clip`, and what it returned."""
    ps = parameters(leaves)
    returned = clip(ps, *args, **kwargs)
    assert ps[-1].grad is None
    return [p.grad for p in ps[:-1]], returned


def assert_parity(dtype, leaves, max_norm, norm_type=2, eps=1e-7):
    norm, count = reference_norm(leaves, norm_type), count_of(leaves)
    (mine, my_norm), (theirs, their_norm) = (
        clipped(module.clip_grad_norm, leaves, max_norm, norm_type, eps) for module in (ours, peer)
    )
    factor = max_norm / (norm + eps) if norm > max_norm else 1.0
    to_exact = tolerance(dtype, count, ord=norm_type)
    to_peer = tolerance(dtype, count, ord=norm_type, peer_ulps=peer_ulps(count, norm_type))
    for leaf, my_leaf, their_leaf in zip(leaves, mine, theirs, strict=True):
        assert type(my_leaf) is np.ndarray
        assert my_leaf.dtype == leaf.dtype
        assert_matches(my_leaf, leaf.astype(np.float64) * factor, to_exact, dtype)
        assert_matches(my_leaf, their_leaf, to_peer, dtype)
    assert_scalars_match(my_norm, their_norm, to_peer)


def assert_scalars_match(mine, theirs, rtol):
    assert type(mine) is type(theirs) is lucid.Tensor
    assert (mine.shape, mine.device, mine.requires_grad) == (theirs.shape, theirs.device, theirs.requires_grad)
    assert str(mine.dtype) == str(theirs.dtype)
    assert mine.item() == pytest.approx(theirs.item(), rel=rtol, abs=0)


@pytest.mark.parametrize("name", NAMES)
def test_signature(name):
    assert arguments(getattr(ours, name)) == arguments(getattr(peer, name))


@every_dtype
@both_sizes
@pytest.mark.parametrize("max_norm", [0.25, 64.0], ids=["clipped", "not clipped"])
def test_clip_grad_norm(dtype, large, max_norm):
    assert_parity(dtype, some_leaves(dtype, large), max_norm)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("norm_type", [1, 2, 3, 4])
def test_orders(dtype, norm_type):
    assert_parity(dtype, some_leaves(dtype), 0.125, norm_type)


@pytest.mark.parametrize("eps", [0.0, 1e-7, 1.0, 5.0])
def test_eps(eps):
    assert_parity("float64", some_leaves("float64"), 0.125, eps=eps)


def test_worked_example():
    for module in (ours, peer):
        one = nn.Parameter(np.zeros(2))
        one.grad = np.array([3.0, 4.0])
        norm = module.clip_grad_norm(one, 1.0, eps=1.0)
        assert norm.item() == 5.0
        assert_matches(one.grad, [3 / 6, 4 / 6], tolerance("float64", 2), "float64")


@every_dtype
@both_sizes
@pytest.mark.parametrize("norm_type", [1, 2])
def test_grad_norm(dtype, large, norm_type):
    leaves = some_leaves(dtype, large)
    mine, theirs = (module.grad_norm(parameters(leaves), norm_type) for module in (ours, peer))
    assert_scalars_match(mine, theirs, peer_ulps(count_of(leaves), norm_type) * ULP[dtype])
    precise = 2.0**-50 if dtype == "float64" else 2.0**-23
    assert mine.item() == pytest.approx(reference_norm(leaves, norm_type), rel=precise, abs=0)


@every_dtype
@pytest.mark.parametrize("clip_value", [0.0, 0.125, 64.0])
def test_clip_grad_value(dtype, clip_value):
    (mine, nothing), (theirs, _) = (
        clipped(module.clip_grad_value, some_leaves(dtype), clip_value) for module in (ours, peer)
    )
    assert nothing is None
    for my_leaf, their_leaf in zip(mine, theirs, strict=True):
        assert np.array_equal(my_leaf, their_leaf)


def test_gradients_are_clipped_where_they_lie():
    one = nn.Parameter(np.zeros(2))
    one.grad = grad = np.array([3.0, 4.0])
    ours.clip_grad_norm([one], 1.0, eps=0.0)
    assert one.grad is grad
    assert_just_below(grad, [0.6, 0.8], "float64")
    ours.clip_grad_value([one], 0.5)
    assert one.grad is grad
    assert grad.tolist() == [0.5, 0.5]


def test_parameters_without_gradients():
    ps = [nn.Parameter(np.zeros(2))]
    with pytest.warns(UserWarning, match="no parameter has a gradient"):
        assert_scalars_match(ours.grad_norm(ps), peer.grad_norm(ps), 0.0)
    with pytest.warns(UserWarning, match="no parameter has a gradient"):
        norm = ours.clip_grad_norm(ps, 1.0)
    assert type(norm) is lucid.Tensor
    assert norm.item() == 0.0
    with pytest.warns(UserWarning, match="no parameter has a gradient"):
        assert ours.clip_grad_value(ps, 1.0) is None
    assert ps[0].grad is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_gradients_are_seen_everywhere(bad):
    ps = parameters([np.array([bad, 1.0]), np.array([2.0])])
    norm = float(ours.clip_grad_norm(ps, 1.0).data)
    assert math.isnan(norm) if math.isnan(bad) else norm == math.inf
    assert all(np.isnan(p.grad).all() for p in ps[:-1])


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_negative_and_nan_thresholds(max_norm):
    ps = parameters([np.array([3.0, 4.0])])
    with pytest.raises(ValueError, match="max_norm must not be negative or NaN"):
        ours.clip_grad_norm(ps, max_norm)
    assert ps[0].grad.tolist() == [3.0, 4.0]


def test_training_takes_the_same_steps():
    weights = []
    for module in (ours, peer):
        model = nn.Linear(4, 2)
        rng = np.random.default_rng(0)
        for p in model.parameters():
            p.data = rng.standard_normal(p.shape)
        x = lucid.tensor(rng.standard_normal((8, 4)))
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            (model(x) ** 2).sum().backward()
            assert module.clip_grad_norm(model.parameters(), 0.5).item() > 1.0
            optimizer.step()
        weights.append(np.concatenate([np.ravel(p.data) for p in model.parameters()]))
    # Five steps of length 0.1 * 0.5, each rounded; errors at most double a step.
    assert np.abs(weights[0] - weights[1]).max() <= 2.0**5 * 0.05 * tolerance("float64", 10, peer_ulps=peer_ulps(10))
