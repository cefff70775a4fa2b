"""What is not finite, under each policy: one norm for all, one for each layer, thresholds by name and of groups."""

import math

import numpy as np
import pytest
import torch

import gradclip
from on_gpu import DTYPES, ON, numbers, on_host, parameters_with
from rational import at_most

pytestmark = pytest.mark.gpu
POLICIES = ("propagate", "drop", "zero")
BAD = (math.nan, math.inf, -math.inf)


def named(bad, dtype=torch.float32):
    """Return parameters by name: a, whose gradient has a bad element, b with (6, 8), and c with (0.3, 0.4)."""
    gradients = [torch.tensor(values, dtype=dtype) for values in ([3.0, bad, 4.0], [6.0, 8.0], [0.3, 0.4])]
    return dict(zip("abc", parameters_with(gradients), strict=True))


def left(params):
    return [x.tolist() for x in on_host([p.grad for p in params.values()])]


def check(found, wanted, rel=1e-2):
    assert [len(x) for x in found] == [len(x) for x in wanted]
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(wanted), rtol=rel)


NOTHING = [[math.nan] * 3, [math.nan] * 2, [math.nan] * 2]
ZEROS = [[0.0] * 3, [0.0] * 2, [0.0] * 2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("policy", POLICIES)
def test_one_norm(policy, bad, dtype):
    params = named(bad, dtype)
    with ON.waiting_is_an_error():
        norm = gradclip.clip_grad_norm_(params.values(), 1.0, nonfinite=policy)
    c = 1 / math.sqrt(25 + 100 + 0.25)
    of_rest = [[3 * c, 0.0, 4 * c], [6 * c, 8 * c], [0.3 * c, 0.4 * c]]
    check(left(params), {"propagate": NOTHING, "drop": ZEROS, "zero": of_rest}[policy])
    assert bool(norm.isfinite()) == (policy == "zero")
    assert policy == "propagate" or at_most(left(params), 2, 1.0)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("policy", POLICIES)
def test_each_layer(policy, bad):
    """What is bad in one layer says nothing of the others."""
    params = named(bad)
    with ON.waiting_is_an_error():
        norms = gradclip.clip_grad_layer_norm_(params.values(), 1.0, nonfinite=policy)
    own = {"propagate": [math.nan] * 3, "drop": [0.0] * 3, "zero": [0.6, 0.0, 0.8]}[policy]
    check(left(params), [own, [0.6, 0.8], [0.3, 0.4]], 1e-6)
    assert [float(norm) for norm in norms[1:]] == pytest.approx([10.0, 0.5], rel=1e-6)
    assert all(at_most([x], 2, 1.0) for x in left(params)[1:])


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("by_name", [True, False], ids=["names", "groups"])
def test_parts(by_name, policy, bad):
    """What is bad in one part counts for all."""
    params = named(bad)
    with ON.waiting_is_an_error():
        if by_name:
            gradclip.clip_grad_norm_(params.items(), {"a": 1.0, "*": 2.0}, nonfinite=policy)
        else:
            groups = [{"params": [params["a"]], "max_norm": 1.0}, {"params": [params["b"], params["c"]]}]
            gradclip.clip_grad_norm_(groups, 2.0, nonfinite=policy)
    c = 2 / math.sqrt(100.25)
    of_rest = [[0.6, 0.0, 0.8], [6 * c, 8 * c], [0.3 * c, 0.4 * c]]
    check(left(params), {"propagate": NOTHING, "drop": ZEROS, "zero": of_rest}[policy], 1e-6)


@pytest.mark.parametrize("by_name", [True, False], ids=["names", "groups"])
def test_finite_parts_are_clipped_by_their_own_norms(by_name):
    params = named(12.0)  # a has norm 13
    with ON.waiting_is_an_error():
        if by_name:
            norm = gradclip.clip_grad_norm_(params.items(), {"a": 6.5, "b": None, "*": 1.0})
        else:
            groups = [
                {"params": [params["a"]], "max_norm": 6.5},
                {"params": [params["b"]], "max_norm": None},
                {"params": [params["c"]]},
            ]
            norm = gradclip.clip_grad_norm_(groups, 1.0)
    assert float(norm) == pytest.approx(math.sqrt(169 + 100 + 0.25), rel=1e-6)
    check(left(params), [[1.5, 6.0, 2.0], [6.0, 8.0], [np.float32(0.3), np.float32(0.4)]], 1e-6)
    assert left(params)[1] == [6.0, 8.0]
    assert at_most(left(params)[:1], 2, 6.5)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    ("call", "max_norm"),
    [
        (gradclip.clip_grad_norm_, 1.0),
        (gradclip.clip_grad_layer_norm_, 1.0),
        (gradclip.clip_grad_norm_, {"a": 1.0, "*": 2.0}),
    ],
    ids=["norm", "layers", "names"],
)
def test_raise_names_the_gradient_and_changes_nothing(call, max_norm, bad):
    params = named(bad)
    before = left(params)
    with pytest.raises(FloatingPointError, match=r"\ba\b"):
        call(params.items(), max_norm, nonfinite="raise")
    np.testing.assert_array_equal(np.concatenate(left(params)), np.concatenate(before))


def test_raise_clips_what_is_finite():
    params = named(12.0)
    assert float(gradclip.clip_grad_norm_(params.items(), 1e9, nonfinite="raise")) == pytest.approx(
        math.sqrt(269.25), rel=1e-6
    )
    gradclip.clip_grad_norm_(params.items(), 1.0, nonfinite="raise")
    assert at_most(left(params), 2, 1.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_functional_calls(policy):
    tree = {"a": numbers(3.0, math.nan, 4.0), "b": numbers(0.3)}
    with ON.waiting_is_an_error():
        clipped, _ = gradclip.clip_by_layer_norm(tree, 1.0, nonfinite=policy)
        together, _ = gradclip.clip_by_global_norm(tree, 5.0, nonfinite=policy)
    a, b = on_host(clipped.values())
    wanted = {"propagate": [math.nan] * 3, "drop": [0.0] * 3, "zero": [0.6, 0.0, 0.8]}[policy]
    np.testing.assert_allclose(a, wanted, rtol=1e-6)
    assert b.tolist() == [np.float32(0.3)]
    values = np.concatenate(on_host(together.values()))
    if policy == "zero":
        assert at_most([values], 2, 5.0)
        np.testing.assert_allclose(values, np.array([3, 0, 4, 0.3]) * 5 / math.sqrt(25.09), rtol=1e-6)
    else:
        assert (np.isnan(values) if policy == "propagate" else values == 0).all()
    (kept,) = on_host([tree["a"]])
    np.testing.assert_array_equal(kept, [3.0, math.nan, 4.0])
