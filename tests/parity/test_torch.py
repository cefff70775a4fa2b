"""Side by side with `torch.nn.utils`: the same parameters through both, and ours beside float64."""

import math
import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.nn import utils as peer

from gradclip.integrations import torch as ours
from parity_support import (
    ULP,
    arguments,
    assert_matches,
    count_of,
    gradients,
    plain_sum_ulps,
    reference_clip,
    reference_norm,
    tolerance,
)

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
    "complex64": np.complex64,
    "complex128": np.complex128,
}
HALF = ("float16", "bfloat16")
ADDED = 1e-6  # to the norm, before dividing
NAMES = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm")

every_dtype = pytest.mark.parametrize("dtype", DTYPES)
both_sizes = pytest.mark.parametrize("large", [False, True], ids=["small", "large"])


def tensor(array):
    """Return a tensor that shares the array's memory, and so its layout."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def numbers(tensor):
    return (tensor.to(torch.complex128) if tensor.is_complex() else tensor.double()).numpy()


def parameters(leaves):
    """Return parameters with copies of the leaves, in the same layout, for gradients."""
    made = []
    for leaf in leaves:
        grad = tensor(leaf)
        made.append(torch.nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype)))
        made[-1].grad = torch.empty_strided(grad.shape, grad.stride(), dtype=grad.dtype).copy_(grad)
    return made


def peer_ulps(dtype, count, norm_type=2.0):
    """Torch rounds the norm, its reciprocal and the product; half types are summed in float32, others in themselves."""
    return 3.0 + (0.0 if dtype in HALF else plain_sum_ulps(count, norm_type))


def clipped(clip, leaves, *args):
    """Return the gradients after `clip`, and what it returned."""
    ps = parameters(leaves)
    returned = clip(ps, *args)
    return [numbers(p.grad) for p in ps], returned


def assert_parity(dtype, leaves, max_norm, norm_type=2.0):
    norm, count = reference_norm(leaves, norm_type), count_of(leaves)
    mine, my_norm = clipped(ours.clip_grad_norm_, leaves, max_norm, norm_type)
    theirs, their_norm = clipped(peer.clip_grad_norm_, leaves, max_norm, norm_type)
    to_exact = tolerance(dtype, count, ord=norm_type)
    peers = peer_ulps(dtype, count, norm_type)
    to_peer = tolerance(dtype, count, ord=norm_type, peer_ulps=peers, shift=ADDED / norm)
    for my_leaf, their_leaf, exact in zip(mine, theirs, reference_clip(leaves, max_norm, norm_type), strict=True):
        assert_matches(my_leaf, exact, to_exact, dtype)
        assert_matches(my_leaf, their_leaf, to_peer, dtype)
    assert_matches(their_norm.double(), my_norm.double(), to_peer, dtype)


@pytest.mark.parametrize("name", NAMES)
def test_signature(name):
    assert arguments(getattr(ours, name)) == arguments(getattr(peer, name))


@every_dtype
@both_sizes
@pytest.mark.parametrize("max_norm", [0.25, 64.0], ids=["clipped", "not clipped"])
def test_clip_grad_norm(dtype, large, max_norm):
    assert_parity(dtype, list(gradients(DTYPES[dtype], large=large).values()), max_norm)


@both_sizes
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("norm_type", [0.5, 1.0, 1.5, 3.0, math.inf, -math.inf])
def test_orders(dtype, large, norm_type):
    leaves = [x for x in gradients(DTYPES[dtype], large=large).values() if x.size]  # the peer's maxima need an element
    assert_parity(dtype, leaves, reference_norm(leaves, norm_type) / 4, norm_type)


@pytest.mark.parametrize("name", gradients(np.float32))
@every_dtype
def test_one_parameter(dtype, name):
    leaf = gradients(DTYPES[dtype])[name]
    if leaf.size:
        assert_parity(dtype, [leaf], 2.0**-6)
    assert float(ours.clip_grad_norm_(parameters([leaf])[0], 1.0)) == pytest.approx(reference_norm([leaf]), rel=1e-6)


@every_dtype
@both_sizes
def test_returned_norm(dtype, large):
    leaves = list(gradients(DTYPES[dtype], large=large).values())
    norm = ours.get_total_norm(map(tensor, leaves))
    wide = dtype in ("float64", "complex128")
    assert norm.dtype is (torch.float64 if wide else torch.float32)
    assert norm.item() == pytest.approx(reference_norm(leaves), rel=2.0**-52 if wide else 2.0**-24, abs=0)
    theirs = peer.get_total_norm(map(tensor, leaves)).double()
    assert_matches(theirs, norm.double(), peer_ulps(dtype, count_of(leaves)) * ULP[dtype], dtype)


@pytest.mark.parametrize("dtype", [name for name in DTYPES if "complex" not in name])
@both_sizes
@pytest.mark.parametrize("clip_value", [0.125, 0.0, 64.0, math.inf])
def test_clip_grad_value(dtype, large, clip_value):
    leaves = list(gradients(DTYPES[dtype], large=large).values())
    mine, _ = clipped(ours.clip_grad_value_, leaves, clip_value)
    theirs, _ = clipped(peer.clip_grad_value_, leaves, clip_value)
    for my_leaf, their_leaf in zip(mine, theirs, strict=True):
        assert np.array_equal(my_leaf, their_leaf)


@every_dtype
@pytest.mark.parametrize("max_norm", [0.25, 64.0], ids=["clipped", "not clipped"])
def test_clip_grads_with_norm(dtype, max_norm):
    leaves = list(gradients(DTYPES[dtype]).values())
    norm = torch.tensor(2.0)
    mine, _ = clipped(ours.clip_grads_with_norm_, leaves, max_norm, norm)
    theirs, _ = clipped(peer.clip_grads_with_norm_, leaves, max_norm, norm)
    rounded_norm = 2.0**-22 if max_norm < 2.0 else 0.0  # ours trusts the given norm to float32 only
    rtol = tolerance(dtype, peer_ulps=3.0, shift=ADDED / 2.0) + rounded_norm
    for my_leaf, their_leaf in zip(mine, theirs, strict=True):
        assert_matches(my_leaf, their_leaf, rtol, dtype)


def test_mixed_dtypes():
    drawn = [gradients(DTYPES[dtype])["size 17"] for dtype in ("float16", "float64", "float32", "bfloat16")]
    mine, _ = clipped(ours.clip_grad_norm_, drawn, 0.25)
    theirs, norm = clipped(peer.clip_grad_norm_, drawn, 0.25)
    for dtype, my_leaf, their_leaf in zip(("float16", "float64", "float32", "bfloat16"), mine, theirs, strict=True):
        # The peer takes the norm of each dtype in that dtype: the coarsest is half an ulp of bfloat16 off.
        peers = peer_ulps(dtype, count_of(drawn))
        rtol = tolerance(dtype, count_of(drawn), peer_ulps=peers, shift=ULP["bfloat16"] / 2 + ADDED / norm.item())
        assert_matches(my_leaf, their_leaf, rtol, dtype)


def test_exhausted_generator_warns_alike():
    messages = []
    for module in (ours, peer):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert module.clip_grad_norm_((p for p in ()), 1.0).item() == 0.0
        messages.append([(str(w.message), w.category, w.filename) for w in caught])
    assert messages[0] == messages[1]
    assert len(messages[0]) == 1


def test_nonfinite_error_begins_alike():
    texts = []
    for module in (ours, peer):
        with pytest.raises(RuntimeError) as raised:
            module.clip_grad_norm_(parameters([np.array([math.nan])]), 1.0, 1, error_if_nonfinite=True)
        texts.append(str(raised.value))
    beginning = "The total norm of order 1.0 for gradients"
    assert [text[: len(beginning)] for text in texts] == [beginning] * 2


def test_empty_list_alike():
    norms = [module.clip_grad_norm_([], 1.0) for module in (ours, peer)]
    assert [(norm.item(), norm.dtype, norm.shape) for norm in norms] == [(0.0, torch.float32, ())] * 2


def test_training_takes_the_same_steps():
    weights = []
    for module in (ours, peer):
        torch.manual_seed(0)
        model = torch.nn.RNN(3, 5, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.randn(7, 2, 3, dtype=torch.float64)
        for _ in range(5):
            optimizer.zero_grad()
            (model(data)[0] ** 2).sum().backward()
            assert float(module.clip_grad_norm_(model.parameters(), 0.5)) > 1.0
            optimizer.step()
        weights.append(torch.cat([p.detach().ravel() for p in model.parameters()]).tolist())
    # Each of five steps has length 0.1 * 0.5, and the peer's is shorter by 1e-6 of it; errors at most double a step.
    assert weights[0] == pytest.approx(weights[1], rel=0, abs=2.0**5 * 0.05 * ADDED)
    assert weights[0] != weights[1]
