"""Noise on integers: what OpenDP is asked for, that answers come back in order, and that no process repeats another."""

import math
import sys

import numpy as np
import pytest
from opendp.mod import GLOBAL_FEATURES

import fresh_process
from gradclip._src.private.noise import discrete
from gradclip._src.private.noise.discrete import EXACT, gaussian, processors, with_discrete_gaussian


@pytest.mark.every_case  # what is put back in order takes several pieces and several threads
@pytest.mark.parametrize("threads", [1, 2, 3, 50, None])
@pytest.mark.parametrize("size", [0, 1, 3, 4, 6, 7, 100])
def test_every_element_gets_its_own_noise(threads, size, monkeypatch):
    asked = []

    def plus_thousand(source, scale):
        asked.append((source, scale))
        return lambda piece: piece + 1000

    monkeypatch.setattr(discrete, "_AT_ONCE", {"system": 3})
    monkeypatch.setattr(discrete, "sampler", plus_thousand)
    [found] = with_discrete_gaussian([np.arange(size)], 5.0, "system", threads)
    assert found.tolist() == list(range(1000, 1000 + size))
    assert found.dtype == np.int64
    assert set(asked) == ({("system", 5.0)} if size else set())
    assert len(asked) <= max(1, threads or processors())


@pytest.mark.parametrize("distance", [1.0, 1024.0, 1e6])
@pytest.mark.parametrize("multiplier", [0.5, 1.0, 4.0])
def test_opendp_promises_the_privacy_of_the_multiplier(distance, multiplier):
    # A Gaussian mechanism of multiplier m satisfies 1 / (2 m**2) zero-concentrated differential privacy.
    measurement = gaussian(multiplier * distance)
    assert measurement.map(distance) == pytest.approx(0.5 / multiplier**2, rel=1e-12)


@pytest.mark.parametrize("source", EXACT)
def test_moments_of_the_noise(source):
    # The mean has a standard deviation of s / sqrt(n), the variance about one of s**2 * sqrt(2 / n). Eight of these
    # are exceeded with probability below 1e-14.
    n, scale = 40_000, 1000.0
    [found] = with_discrete_gaussian([np.full(n, 10**6)], scale, source, threads=2)
    found = found.astype(float) - 10**6
    assert abs(found.mean()) < 8 * scale / math.sqrt(n)
    assert abs(found.var() / scale**2 - 1) < 8 * math.sqrt(2 / n)
    assert abs((found > 0).mean() - 0.5) < 8 * 0.5 / math.sqrt(n) + 1 / scale
    # Not repeated from one thread or piece to the other.
    pieces = found.reshape(-1, 4_000)
    assert len({tuple(piece) for piece in pieces}) == 10


@pytest.mark.parametrize("source", EXACT)
def test_sums_beyond_int64_become_the_nearest(source):
    largest = 2**63 - 1
    [found] = with_discrete_gaussian([np.full(200, largest)], 64.0, source)
    assert found.max() == largest  # all below has probability below 2**-200
    assert found.min() > largest - 64 * 60


FORKS = """
import os
import numpy as np
from gradclip._src.private.noise.discrete import with_discrete_gaussian

def noise():
    return with_discrete_gaussian([np.zeros(8, np.int64)], 2.0**30, {source!r})[0].tolist()

noise()  # the generator has a state now, if it has any
for _ in range(2):
    child = os.fork()
    if not child:
        print(noise(), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
print(noise())
"""


@pytest.mark.parametrize("source", EXACT)
def test_forked_processes_do_not_repeat_noise(source):
    found = fresh_process.run(FORKS.format(source=source), ".").splitlines()
    assert [line.count(",") for line in found] == [7] * 3
    assert len(set(found)) == 3


AT_THE_END = """
import atexit
import numpy as np
from gradclip._src.private.noise.discrete import with_discrete_gaussian

@atexit.register
def noise():
    [found] = with_discrete_gaussian([np.zeros(2**17, np.int64)], 2.0**30, threads=2)
    print(found.size, np.count_nonzero(found) > 2**17 - 9)
"""


def test_one_thread_does_all_where_no_other_can_be_started():
    assert fresh_process.run(AT_THE_END, ".") == "131072 True"


def test_opendp_is_left_as_it_was():
    before = set(GLOBAL_FEATURES)
    try:
        GLOBAL_FEATURES.clear()
        gaussian(100.0)
        assert not GLOBAL_FEATURES
        GLOBAL_FEATURES.update({"contrib", "floating-point"})
        gaussian(100.0)
        assert sorted(GLOBAL_FEATURES) == ["contrib", "floating-point"]
    finally:
        GLOBAL_FEATURES.clear()
        GLOBAL_FEATURES.update(before)


def test_without_opendp_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opendp.domains", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"needs opendp, which is not installed. To install: pip install '\.\[private"
    ):
        gaussian(100.0)
