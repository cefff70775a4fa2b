"""Gradients that lie in the same memory: it counts, and is scaled, once; sharing only some elements is an error."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gradclip
from frameworks import ALL, by_name
from gradclip.backends.memory import Region, first_meeting, region_of_array
from gradclip.inplace.clip import clip_grads_with_norm_

HOLDING = [f for f in ALL if f.name in ("numpy", "torch", "torch-device")]
every_framework = pytest.mark.parametrize("framework", HOLDING, ids=by_name)


def holders(*grads):
    return [SimpleNamespace(grad=grad) for grad in grads]


def matrix(framework, dtype="float32"):
    """Return a matrix of norm 13."""
    return framework.array([[3.0, 4.0, 0.0], [12.0, 0.0, 0.0]], dtype)


VIEWS = {
    "itself": lambda w: w,
    "transposed": lambda w: w.T,
    "one row": lambda w: w.reshape(6),
    "other shape": lambda w: w.reshape(3, 1, 2),
    "axis more": lambda w: w[None],
    "slice of all": lambda w: w[:, :3],
    "rows turned": lambda w: w[::-1] if isinstance(w, np.ndarray) else w,
}
every_view = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
PARTS = {
    "row": lambda w: w[0],
    "column": lambda w: w[:, 1],
    "corner": lambda w: w[1:, :2],
    "every second": lambda w: w.reshape(6)[::2],
    "diagonal": lambda w: w.reshape(6)[::4],
}


def scaled(framework, w, factor):
    np.testing.assert_allclose(framework.to_numpy(w), np.array([[3.0, 4.0, 0.0], [12.0, 0.0, 0.0]]) * factor, rtol=2e-2)


@every_framework
@every_view
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_views_of_the_same_elements_count_once(framework, view, dtype):
    with framework.mode():
        w = matrix(framework, dtype)
        for first, second in ((w, view(w)), (view(w), w)):
            assert float(gradclip.grad_norm(holders(first, second, first))) == 13.0
            assert float(gradclip.grad_norm(holders(first, second), 1)) == 19.0
        alone = framework.array([5.0], dtype)
        ps = holders(w, alone, view(w))
        assert float(gradclip.clip_grad_norm_(ps, 194.0**0.5 / 2)) == pytest.approx(194.0**0.5, rel=1e-6)
        scaled(framework, w, 0.5)
        assert float(np.real(framework.to_numpy(alone))[0]) == pytest.approx(2.5, rel=1e-2)
        assert ps[0].grad is w
        clip_grads_with_norm_(holders(view(w), w), 1.0, 2.0)
        scaled(framework, w, 0.25)


@every_framework
@every_view
def test_values_are_clamped_where_they_lie(framework, view):
    with framework.mode():
        w = matrix(framework)
        gradclip.clip_grad_value_(holders(w, view(w)), 6.0)
    assert framework.to_numpy(w).tolist() == [[3.0, 4.0, 0.0], [6.0, 0.0, 0.0]]


@every_framework
@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_gradients_that_share_some_elements_are_refused(framework, part, strided):
    with framework.mode():
        w = framework.array(np.arange(12.0).reshape(2, 6))[:, ::2] if strided else matrix(framework)
        before = framework.to_numpy(w).copy()
        if strided and "reshape" in part.__code__.co_names:
            return
        other = framework.array([1.0])
        for given in (holders(w, other, part(w)), holders(part(w), other, w)):
            for call in (
                gradclip.grad_norm,
                lambda ps: gradclip.clip_grad_norm_(ps, 1.0),
                lambda ps: gradclip.clip_grad_norm_(ps, 1.0, nonfinite="raise"),
                lambda ps: gradclip.clip_grad_value_(ps, 1.0),
                lambda ps: clip_grads_with_norm_(ps, 1.0, 5.0),
            ):
                with pytest.raises(
                    ValueError, match=r"parameters\[[02]\]\.grad and parameters\[[02]\]\.grad share some of"
                ):
                    call(given)
        assert np.array_equal(framework.to_numpy(w), before)


@every_framework
def test_other_numbers_in_the_same_memory_are_refused(framework):
    with framework.mode():
        x = framework.array([1.0, 2.0], "complex64")
        real = torch.view_as_real(x) if framework.name != "numpy" else x.view(np.float32)
        with pytest.raises(ValueError, match="share some of their memory"):
            gradclip.clip_grad_norm_(holders(x, real), 1.0)


@every_framework
def test_interleaved_gradients_are_no_overlap(framework):
    with framework.mode():
        buffer = framework.array(np.ones(12))
        square = framework.array(np.ones((4, 6)))
        cube = framework.array(np.ones((3, 2, 2)))
        for parts in (
            [buffer[::2], buffer[1::2]],
            [buffer[::3], buffer[1::3], buffer[2::3]],
            [buffer[:4], buffer[4:5], buffer[5:]],
            [square[:, :2], square[:, 2:3], square[:, 3:]],
            [square[:2, :3], square[2:, :3], square[:, 3:]],
            [cube[:, i, j] for i in (0, 1) for j in (0, 1)],
            [cube[:, :, 0], cube[:, 0, 1], cube[:, 1, 1]],
        ):
            count = sum(framework.to_numpy(part).size for part in parts)
            assert float(gradclip.grad_norm(holders(*parts), 1)) == pytest.approx(count, rel=1e-6)
            gradclip.clip_grad_norm_(holders(*parts), count**0.5 * 0.5)
            found = np.concatenate([framework.to_numpy(part).ravel() for part in parts])
            np.testing.assert_allclose(found, np.full(count, 0.5), rtol=1e-5)
            for part in parts:
                part[...] = 1.0


def test_a_tree_of_arrays_counts_memory_once():
    w = np.array([[3.0, 4.0], [12.0, 0.0]])
    assert float(gradclip.clip_grad_norm_({"a": w, "b": [w.T, w.reshape(4)]}, 6.5)) == 13.0
    np.testing.assert_allclose(w, [[1.5, 2.0], [6.0, 0.0]], rtol=1e-14)
    with pytest.raises(ValueError, match=r"\['a'\] and \['b'\]\[0\] share some of their memory"):
        gradclip.clip_grad_norm_({"a": w, "b": [w[0]]}, 1.0)
    np.testing.assert_allclose(w, [[1.5, 2.0], [6.0, 0.0]], rtol=1e-14)


def test_a_functional_call_counts_every_leaf():
    w = np.array([3.0, 4.0])
    assert float(gradclip.global_norm({"a": w, "b": w})) == pytest.approx(50**0.5, rel=1e-14)
    clipped, _ = gradclip.clip_by_global_norm({"a": w, "b": w}, 50**0.5 / 2)
    np.testing.assert_allclose(clipped["b"], [1.5, 2.0], rtol=1e-13)


def read_only(x):
    view = x.view()
    view.flags.writeable = False
    return view


def test_read_only_views_count_once_and_are_replaced():
    w = np.array([[3.0, 4.0], [12.0, 0.0]])
    for policy in ("propagate", "zero"):
        ps = holders(read_only(w), np.array([np.nan if policy == "zero" else 0.0]), read_only(w).T)
        assert float(gradclip.clip_grad_norm_(ps, 6.5, nonfinite=policy)) == 13.0
        np.testing.assert_allclose(ps[0].grad, [[1.5, 2.0], [6.0, 0.0]], rtol=1e-14)
        np.testing.assert_allclose(ps[2].grad, [[1.5, 6.0], [2.0, 0.0]], rtol=1e-14)
    ps = holders(read_only(w), read_only(w).T)
    gradclip.clip_grad_value_(ps, 5.0)
    assert [p.grad.tolist() for p in ps] == [[[3.0, 4.0], [5.0, 0.0]], [[3.0, 5.0], [4.0, 0.0]]]
    assert w.tolist() == [[3.0, 4.0], [12.0, 0.0]]


def test_of_a_writable_array_and_read_only_views_the_array_is_written():
    w = np.array([3.0, 4.0])
    view = read_only(w)
    ps = holders(view, w)
    assert float(gradclip.clip_grad_norm_(ps, 1.0)) == 5.0
    np.testing.assert_allclose(w, [0.6, 0.8], rtol=1e-14)
    assert ps[0].grad is view
    assert ps[1].grad is w


def test_expanded_tensors_are_values_of_their_own():
    one = torch.tensor(1.0)
    ps = holders(one.expand(3), one.expand(3), one.expand(2, 2), one)
    assert float(gradclip.clip_grad_norm_(ps, 11**0.5 / 2)) == pytest.approx(11**0.5, rel=1e-6)
    for p in ps:
        np.testing.assert_allclose(p.grad, np.full(p.grad.shape, 0.5), rtol=1e-6)


def test_conjugates_and_sparse_values_are_views_too():
    z = torch.tensor([3.0 + 4.0j, 0.0])
    assert float(gradclip.clip_grad_norm_(holders(z, z.conj()), 2.5)) == 5.0
    np.testing.assert_allclose(z.numpy(), [1.5 + 2.0j, 0.0], rtol=1e-6)
    values = torch.tensor([3.0, 4.0])
    indices = torch.tensor([[0, 2]])
    first = torch.sparse_coo_tensor(indices, values, (4,), is_coalesced=True, check_invariants=True)
    second = torch.sparse_coo_tensor(indices, values, (5,), is_coalesced=True, check_invariants=True)
    assert float(gradclip.clip_grad_norm_(holders(first, values, second), 2.5)) == 5.0
    np.testing.assert_allclose(values, [1.5, 2.0], rtol=1e-6)


def test_tensors_and_arrays_without_elements_overlap_nothing():
    w = torch.ones(4)
    assert float(gradclip.grad_norm(holders(w, w[:0], w[2:2], w))) == 2.0


@pytest.mark.parametrize("seed", range(20))
def test_regions_meet_where_a_search_of_all_addresses_says_so(seed):
    rng = np.random.default_rng(seed)
    buffer = np.zeros((8, 6, 5), np.float32)

    def cut(length):
        start = int(rng.integers(length))
        return slice(start, int(rng.integers(start, length)) + 1, int(rng.integers(1, 4)))

    views = [
        buffer[tuple(map(cut, buffer.shape))].transpose(rng.permutation(3)) for _ in range(int(rng.integers(2, 5)))
    ]
    regions = {region_of_array(view) for view in views}
    addresses = []
    for region in regions:
        offsets = np.zeros(1, np.int64)
        for step, count in region.axes:
            offsets = (offsets[:, None] + step * np.arange(count)).ravel()
        addresses.append({region.address + int(offset) for offset in offsets})
    meets = sum(map(len, addresses)) > len(set().union(*addresses))
    assert (first_meeting(list(regions)) is not None) == meets


def test_few_of_many_columns_and_rows_are_compared_pair_by_pair(monkeypatch):
    compared = []
    meets = Region.meets
    monkeypatch.setattr(Region, "meets", lambda *pair: compared.append(pair) or meets(*pair))
    square = np.zeros((30, 5000), np.float32)
    columns = [region_of_array(square[:, i]) for i in range(5000)]
    above = [region_of_array(square[:7, i]) for i in range(5000)]
    rows = [region_of_array(square[i]) for i in range(7, 30)]
    assert first_meeting(columns) is None
    assert first_meeting(rows) is None
    assert compared == []
    assert first_meeting([*above, *rows]) is None
    assert first_meeting([*columns, region_of_array(square[7, 3:9])]) is not None
    assert len(compared) < 10
    assert Region.of(0, 4, "float32", (3,), (4,)) is None
