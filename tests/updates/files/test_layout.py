import itertools

import numpy as np
import pytest

from gradclip._src.updates.files import layout
from gradclip._src.updates.files.layout import MemoryLayout

C_ORDER, FORTRAN_ORDER = MemoryLayout.c_order((2, 3, 4)), MemoryLayout.fortran_order((2, 3, 4))
MEMORY = np.arange(1000, dtype=np.int32)
LAYOUTS = [
    MemoryLayout((), ()),
    MemoryLayout((0, 3), (3, 1)),
    MemoryLayout((1, 7, 1), (99, 1, 5)),
    MemoryLayout((5, 7), (1, 5)),
    MemoryLayout((5, 7), (14, 2)),
    MemoryLayout((4, 6), (0, 1)),
    MemoryLayout((3, 4), (1, 1)),
    *(
        MemoryLayout(tuple(np.array((2, 3, 4))[list(p)]), tuple(np.array((12, 4, 1))[list(p)]))
        for p in itertools.permutations(range(3))
    ),
]


def strided(one):
    return np.lib.stride_tricks.as_strided(MEMORY, one.shape, [4 * d for d in one.strides])


def read(offset, memory):
    memory[:] = MEMORY.view(np.uint8)[offset : offset + len(memory)].data


@pytest.mark.parametrize("one", LAYOUTS)
@pytest.mark.parametrize(("block", "at_once"), [(1 << 24, 1 << 18), (24, 8), (4, 4), (64, 4)])
def test_gathered_is_c_order(monkeypatch, one, block, at_once):
    monkeypatch.setattr(layout, "GATHERED", block)
    monkeypatch.setattr(layout, "_IN_ONE_READ", at_once)
    blocks = list(one.gathered(MEMORY.dtype, read))
    assert np.concatenate([np.empty(0, np.int32), *blocks]).tolist() == strided(one).reshape(-1).tolist()
    assert all(x.nbytes <= block for x in blocks)


@pytest.mark.parametrize("one", LAYOUTS)
def test_span_ends_at_the_last_element(one):
    places = strided(one).reshape(-1)
    assert one.span == (places.max() + 1 if places.size else 0)


@pytest.mark.parametrize("one", LAYOUTS)
def test_dense_and_in_c_order_are_what_they_say(one):
    places = strided(one).reshape(-1).tolist()
    assert one.dense == (sorted(places) == list(range(len(places))))
    assert one.in_c_order == (places == list(range(len(places))))


def test_neighbors_are_read_together():
    calls = []

    def counted(offset, memory):
        calls.append(len(memory))
        memory[:] = bytes(len(memory))

    every_second = MemoryLayout((1_000_000,), (2,))
    (block,) = every_second.gathered(MEMORY.dtype, counted)
    assert block.size == 1_000_000
    assert len(calls) < 40
    assert 8_000_000 - 4 * len(calls) <= sum(calls) <= 8_000_000


@pytest.mark.parametrize("one", LAYOUTS)
def test_in_memory_order_has_the_same_elements(one):
    places = strided(one.in_memory_order).reshape(-1).tolist()
    assert sorted(places) == sorted(strided(one).reshape(-1).tolist())
    assert 0 in one.strides or one.shape == (3, 4) or places == sorted(places)


def test_bytes_read_are_what_reading_takes():
    assert MemoryLayout.c_order((3, 4)).bytes_read(8) == 96
    assert MemoryLayout((1000,), (3,)).bytes_read(4) == (1 + 999 * 3) * 4 + 16384
    assert MemoryLayout((10, 100), (5000, 1)).bytes_read(4) == 10 * (400 + 16384)
    assert MemoryLayout((10**6, 100), (0, 1)).bytes_read(4) == 4 * 10**8
    assert MemoryLayout((0, 5), (7, 2)).bytes_read(4) == 0


def test_orders_are_those_of_numpy():
    x = np.empty((2, 3, 4), np.int8)
    assert C_ORDER.strides == x.strides
    assert FORTRAN_ORDER.strides == np.asfortranarray(x).strides
    assert C_ORDER.size == 24
