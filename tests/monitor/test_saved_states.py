"""A state as lists and numbers, as other formats give it back, and what no state can hold."""

import json
import math

import numpy as np
import pytest

from gradclip._src.monitor.records import Counts, Layers, Step
from gradclip._src.monitor.saved import State, real, whole

STEPS = [Step(3, 2.0, 1.0, layers=Layers(("a", "b"), np.float32([1.5, 0.25]))), Step(7, math.inf, 0.5, True)]
STATE = State(STEPS, Counts(9, 4, 2, 3), 5, [])


@pytest.mark.parametrize("again", [lambda plain: json.loads(json.dumps(plain)), lambda plain: arrays(plain)])
def test_a_state_goes_through_formats_that_change_types(again):
    assert repr(State.of(again(STATE.plain()))) == repr(STATE)


def arrays(plain):
    """Return each list of numbers as an array, as checkpoints of JAX may."""
    numbers = {name: np.array(plain[name]) for name in ("counts", "calls", "step", "norm", "max_norm", "skipped")}
    return plain | numbers


@pytest.mark.parametrize("value", [True, 1.0, -1, 2**53 + 1, "1", None, math.nan, np.float64(2), [1]])
def test_numbers_of_steps(value):
    assert whole(np.int32(3)) == 3
    with pytest.raises(ValueError, match=r"must be a whole number from 0 to 2\*\*53, got "):
        whole(value)


@pytest.mark.parametrize("value", [True, "1", None, 1j, [1.0], -(10**400)])
def test_numbers_that_are_norms(value):
    assert real(np.float32(0.5)) == 0.5
    with pytest.raises(ValueError, match="a norm, threshold or loss must"):
        real(value)


def test_the_error_says_what_is_wrong():
    for name, value, words in (
        ("step", [7, 3], "the numbers of steps must rise, got 3 after 7"),
        ("counts", [1, 1, 1, 1], "counts must be those of all steps"),
        ("names", [["a", "a"]], "the names of layers must be different strings"),
        ("layers", [[0, 1.0], []], "got 2 names and 1 norms"),
        ("norm", [1.0], "shorter"),
    ):
        with pytest.raises(ValueError, match=f"this is not the state of a Monitor: .*{words}.*Pass the result of its"):
            State.of(STATE.plain() | {name: value})
