"""Examples that break careless sums: each holds what its name says, within the range of its dtype."""

import math

import numpy as np
import pytest

from gradclip._src.core.formats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from gradclip._src.private.audit.attacks import CROWDS, KINDS, Room

FORMATS = [FLOAT16, BFLOAT16, FLOAT32, FLOAT64]


def room(format, threshold=1.0, size=50):
    return Room.of([size - 1, 1], [format, format], threshold)


def drawn(kind, format, **settings):
    here = room(format, **settings)
    return here.within(KINDS[kind](np.random.default_rng(0), here)), here


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("kind", KINDS)
def test_no_finite_number_is_beyond_the_dtype(kind, format):
    for size in (1, 50):
        values, here = drawn(kind, format, size=size)
        assert values.shape == (size,)
        finite = values[np.isfinite(values)]
        assert (np.abs(finite) <= here.largest[0]).all()
        assert (~np.isfinite(values)).sum() == {"one NaN": 1, "nothing but NaN": size, "one infinity": 1}.get(kind, 0)


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_squares_leave_the_range_as_they_are_named_for(format):
    over, here = drawn("squares overflow", format)
    under, _ = drawn("squares underflow", format)
    with np.errstate(over="ignore"):
        assert (over**2 >= here.largest * (1 - 1e-12)).all()
    assert (np.abs(under) < math.sqrt(0.5) * np.sqrt(here.step)).all()
    assert under.all()


def test_norms_lie_where_they_are_named_for():
    at, _ = drawn("norm at the threshold", FLOAT32, threshold=3.0)
    far, _ = drawn("far above the threshold", FLOAT32, threshold=3.0)
    alone, _ = drawn("one large element", FLOAT32, threshold=3.0)
    assert math.sqrt(at @ at) == pytest.approx(3.0, rel=2.0**-21)
    assert math.sqrt(far @ far) == pytest.approx(3e4)
    assert sorted(np.abs(alone).tolist())[-2:] == [0.0, 30.0]


def test_a_threshold_of_zero_counts_as_one():
    assert room(FLOAT32, threshold=0.0).threshold == 1.0


def test_crowds_point_as_the_example_does_or_against_it():
    rng, here = np.random.default_rng(0), room(FLOAT32)
    example = here.direction(rng)
    for name, sign in (("examples like it", 1), ("opposite examples", -1)):
        crowd = CROWDS[name](rng, here, 4, example)
        lengths = sign * (crowd @ example)
        assert ((lengths >= 1.0 - 1e-9) & (lengths <= 2.0)).all()
        np.testing.assert_allclose(crowd, sign * lengths[:, None] * example)
    assert not CROWDS["zeros"](rng, here, 4, example).any()
    assert CROWDS["random examples"](rng, here, 4, example).shape == (4, 50)
