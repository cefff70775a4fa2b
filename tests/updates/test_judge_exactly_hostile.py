"""Updates from clients who want the server to take long."""

import math
import time

import numpy as np
import pytest

from gradclip import check_update, norm_at_most
from near_the_bound import near_one

MEGABYTE = 1 << 17  # numbers
ENOUGH = 3.0  # seconds of the processor, which the sums take less than a tenth of


def timed(call):
    start = time.thread_time()
    found = call()
    return found, time.thread_time() - start


@pytest.mark.parametrize(("power", "spread"), [(3, 1000), (8, 0), (8, 900)])
def test_a_norm_within_rounding_of_its_bound_is_decided_soon(power, spread):
    x = near_one(MEGABYTE, power, spread)
    above = np.append(x, x[-1])
    for update, fine in ((x, True), (above, False)):
        judged, taken = timed(lambda update=update: check_update({"w": update}, 1.0, ord=power))
        assert (judged.ok, judged.norm) == (fine, 1.0)
        assert (judged.excess > 0) != fine
        decided, taken_too = timed(lambda update=update: norm_at_most(update, 1.0, ord=power))
        assert decided == fine
        assert taken + taken_too < ENOUGH


@pytest.mark.parametrize("ord", [math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["circle", "beside the axis", "near the axis"])
def test_complex_numbers_of_about_one_magnitude_are_compared_soon(kind, ord):
    rng, distance = np.random.default_rng(0), np.arange(6 * MEGABYTE) * 2.0**-53
    z = {
        "circle": lambda: np.exp(1j * rng.uniform(0, 6.28, distance.size)),
        "beside the axis": lambda: 1 + 1j * rng.uniform(1e-30, 1e-20, distance.size),
        "near the axis": lambda: 1 - distance + 1j * np.sqrt(distance * (2 - distance)),
    }[kind]()
    judged, taken = timed(lambda: check_update({"z": z}, 1.0, ord=ord))
    assert judged.ok == (ord < 0 and kind != "beside the axis")
    assert taken < ENOUGH
