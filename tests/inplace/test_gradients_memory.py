"""Every way for gradients to lie in one memory: views, parts, other dtypes, read-only, expanded and sparse ones."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gradclip
from frameworks import ALL, by_name

HOLDING = [f for f in ALL if f.name in ("numpy", "torch", "torch-device")]
on_both = pytest.mark.parametrize("framework", HOLDING[1:], ids=by_name)
every_framework = pytest.mark.parametrize("framework", HOLDING, ids=by_name)
MATRIX = [[3.0, 4.0, 0.0], [12.0, 0.0, 0.5]]
SHARING = {
    "all": lambda w: w[...],
    "transposed": lambda w: w.T,
    "one row": lambda w: w.reshape(6),
    "axis more": lambda w: w[None],
    "rows turned": lambda w: w[::-1] if isinstance(w, np.ndarray) else w,
    "row": lambda w: w[0],
    "column": lambda w: w[:, 1],
    "corner": lambda w: w[1:, :2],
    "every second": lambda w: w.reshape(6)[::2],
    "diagonal": lambda w: w.reshape(6)[::4],
}


def holders(*grads):
    return [SimpleNamespace(grad=grad) for grad in grads]


@every_framework
@pytest.mark.parametrize("share", SHARING.values(), ids=SHARING)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_memory_is_scaled_once(framework, share, dtype):
    with framework.mode():
        for turn in (1, -1):
            for as_tree in (False, True)[: 2 if framework.name == "numpy" else 1]:
                w = framework.array(MATRIX, dtype)
                grads = [w, framework.array([5.0], dtype), share(w)][::turn]
                given = grads if as_tree else holders(*grads)
                numbers = [framework.to_numpy(x).astype(complex) for x in grads]
                norm = math.sqrt(sum((abs(x) ** 2).sum() for x in numbers))
                assert float(gradclip.grad_norm(given)) == pytest.approx(norm, rel=1e-6)
                assert float(gradclip.clip_grad_norm_(given, norm / 2)) == pytest.approx(norm, rel=1e-6)
                for x, y in zip(grads, numbers, strict=True):
                    np.testing.assert_allclose(framework.to_numpy(x).astype(complex), y / 2, rtol=2e-2)


@every_framework
def test_a_parameter_listed_twice_counts_once(framework):
    with framework.mode():
        w = framework.array([3.0, 4.0])
        one, other = holders(w, w)
        assert float(gradclip.grad_norm([one, one])) == 5.0
        assert float(gradclip.clip_grad_norm_([one, other, one], 2.0)) == pytest.approx(50**0.5, rel=1e-6)
        np.testing.assert_allclose(framework.to_numpy(w), np.array([3.0, 4.0]) * 2 / 50**0.5, rtol=1e-6)
        assert [one.grad is w, other.grad is w] == [True, True]


@every_framework
def test_other_numbers_in_the_same_memory(framework):
    with framework.mode():
        x = framework.array([3.0, 4.0], "complex64")
        parts = x.view(np.float32) if framework.name == "numpy" else torch.view_as_real(x)
        assert float(gradclip.clip_grad_norm_(holders(x, parts), 1.0)) == pytest.approx(50**0.5, rel=1e-6)
        np.testing.assert_allclose(framework.to_numpy(x), np.array([3.0, 4.0]) / 50**0.5, rtol=1e-6)
        wide = framework.array([3.0, 4.0], "float64")
        narrow = wide.view(np.float32) if framework.name == "numpy" else wide.view(torch.float32)
        given = holders(wide, narrow)
        copies = holders(copy.deepcopy(wide), copy.deepcopy(narrow))
        assert float(gradclip.clip_grad_norm_(given, 1.0)) == float(gradclip.clip_grad_norm_(copies, 1.0))
        for one, alone in zip(given, copies, strict=True):
            np.testing.assert_array_equal(framework.to_numpy(one.grad), framework.to_numpy(alone.grad))


@pytest.mark.after_error
def test_a_tree_is_refused_where_no_single_number_scales_the_memory():
    w = np.array([[3.0, 4.0], [12.0, 0.0]])
    before = w.copy()
    tree = {"a": w, "b": [np.ones(3), w[0]]}
    for call in (gradclip.clip_grad_layer_norm_, gradclip.clip_grad_unit_norm_):
        with pytest.raises(ValueError, match=r"\['a'\], \['b'\]\[1\] share memory.* Pass copies"):
            call(tree, 1.0)
    with pytest.raises(ValueError, match=r"\['a'\], \['b'\] share memory as numbers of different formats"):
        gradclip.clip_grad_norm_({"a": w, "b": w.view(np.float32)}, 1.0)
    np.testing.assert_array_equal(w, before)
    norms = gradclip.clip_grad_layer_norm_({"all": {"w": w, "row": w[0]}, "c": np.ones(1)}, {"all": 97**0.5, "c": 1.0})
    assert float(norms["all"]) == pytest.approx(194**0.5, rel=1e-14)
    np.testing.assert_allclose(w, before / 2**0.5, rtol=1e-14)


def read_only(x):
    view = x.view()
    view.flags.writeable = False
    return view


def test_views_that_cannot_be_written_are_replaced():
    w = np.array([3.0, 4.0])
    for call in (gradclip.clip_grad_norm_, gradclip.clip_grad_layer_norm_):
        ps = holders(read_only(w), w[:1], read_only(w)[::-1])
        clones = holders(*(p.grad.copy() for p in ps))
        call(ps, 1.0), call(clones, 1.0)
        for p, clone in zip(ps, clones, strict=True):
            np.testing.assert_allclose(p.grad, clone.grad, rtol=1e-14)
    ps = holders(read_only(w), read_only(w))
    kept = w.copy()
    gradclip.clip_grad_value_(ps, 0.1)
    assert [p.grad.tolist() for p in ps] == [[0.1, 0.1]] * 2
    np.testing.assert_array_equal(w, kept)


@on_both
def test_expanded_conjugate_and_sparse_gradients(framework):
    def drawn():
        one, z, stored = torch.tensor([2.0]), torch.tensor([3.0 + 4.0j, 1.0]), torch.tensor([3.0, 4.0])
        at = torch.tensor([[0, 2]])
        sparse = [
            torch.sparse_coo_tensor(at, stored, (size,), is_coalesced=True, check_invariants=True) for size in (4, 5)
        ]
        return [one.expand(3), one, one.expand(2, 2), z, z.conj(), sparse[0], stored, sparse[1]]

    for call in (gradclip.clip_grad_norm_, lambda ps, c: gradclip.clip_grad_layer_norm_(ps, [c + i for i in range(8)])):
        ps, clones = holders(*drawn()), holders(*(x.clone() for x in drawn()))
        with framework.mode():
            call(ps, 0.5), call(clones, 0.5)
        for p, clone in zip(ps, clones, strict=True):
            torch.testing.assert_close(p.grad.to_dense(), clone.grad.to_dense(), rtol=1e-6, atol=0)
