"""Where gradients lie in memory: which sets of them share elements, directly or through others."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gradclip
from frameworks import ALL, by_name
from gradclip._src.core.memory import Region, meeting, region_of_array

HOLDING = [f for f in ALL if f.name in ("numpy", "torch", "torch-device")]
every_framework = pytest.mark.parametrize("framework", HOLDING, ids=by_name)


def holders(*grads):
    return [SimpleNamespace(grad=grad) for grad in grads]


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


def test_a_functional_call_counts_every_leaf():
    w = np.array([3.0, 4.0])
    assert float(gradclip.global_norm({"a": w, "b": w})) == pytest.approx(50**0.5, rel=1e-14)
    clipped, _ = gradclip.clip_by_global_norm({"a": w, "b": w}, 50**0.5 / 2)
    np.testing.assert_allclose(clipped["b"], [1.5, 2.0], rtol=1e-13)


def test_tensors_and_arrays_without_elements_overlap_nothing():
    w = torch.ones(4)
    assert float(gradclip.grad_norm(holders(w, w[:0], w[2:2]))) == 2.0


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
    regions = list(map(region_of_array, views))
    addresses = []
    for region in regions:
        offsets = np.zeros(1, np.int64)
        for step, count in region.axes:
            offsets = (offsets[:, None] + step * np.arange(count)).ravel()
        addresses.append({region.address + int(offset) for offset in offsets})
    assert sorted(map(sorted, meeting(regions))) == joined(addresses)


def joined(addresses):
    """Return the sets of indices of places that share addresses, directly or through others."""
    sets = [({index}, set(places)) for index, places in enumerate(addresses)]
    for _, places in enumerate(addresses):
        touched = [one for one in sets if one[1] & places]
        rest = [one for one in sets if not one[1] & places]
        sets = [*rest, (set().union(*(one for one, _ in touched)), set().union(*(at for _, at in touched)))]
    return sorted(sorted(indices) for indices, _ in sets if len(indices) > 1)


def test_the_largest_comes_first():
    w = np.zeros(10)
    views = [w[:2], w[8:], w, w[1:4], np.zeros(3), w[::2], w[:]]
    assert meeting([region_of_array(view) for view in views]) == [[2, 6, 5, 3, 0, 1]]
    one = np.ones(1)
    expanded = [np.broadcast_to(one, 3), one, np.broadcast_to(one, (2, 2)), np.ones(2)]
    assert meeting([region_of_array(view) for view in expanded]) == [[0, 1, 2]]


def test_few_of_many_columns_and_rows_are_compared_pair_by_pair(monkeypatch):
    compared = []
    meets = Region.meets
    monkeypatch.setattr(Region, "meets", lambda *pair: compared.append(pair) or meets(*pair))
    square = np.zeros((30, 5000), np.float32)
    columns = [region_of_array(square[:, i]) for i in range(5000)]
    above = [region_of_array(square[:7, i]) for i in range(5000)]
    rows = [region_of_array(square[i]) for i in range(7, 30)]
    assert meeting(columns) == meeting(rows) == []
    assert compared == []
    assert meeting([*above, *rows]) == []
    assert meeting([*columns, region_of_array(square[7, 3:9])]) == [[3, 4, 5, 6, 7, 8, 5000]]
    assert len(compared) < 30
    assert len(meeting([*columns[:300], region_of_array(square)])[0]) == 301
    assert len(compared) < 1000
    assert Region.of(0, 4, (3,), (4,)) is None
