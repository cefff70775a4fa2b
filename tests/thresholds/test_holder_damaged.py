"""A state that no `AdaptiveThreshold` has written."""

import math

import numpy as np
import pytest

import gradclip
from gradclip import AdaptiveThreshold


@pytest.mark.after_error
@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        ({"held": math.nan}, "it holds nan"),
        ({"held": -1.0}, "it holds -1.0"),
        ({"held": "x"}, "could not convert string"),
        ({"norms": [1.0, math.nan]}, "it holds nan"),
        ({"norms": [math.inf]}, "it holds inf"),
        ({"norms": None}, "not iterable"),
        ({"dtype": "int8"}, "it holds 'int8'"),
        ({"norms": [10**400]}, "too large"),
        ({"norms": "123"}, "it holds '123'"),
        ({"norms": {1.0: 2}}, "it holds"),
        ({"norm": "abc"}, "it holds 'abc'"),
        ({"norm": 10**400}, "too large"),
        ({"max_norm": [1]}, "must be a"),
        ({"max_norm": -5.0}, "it holds -5.0"),
        ({"steps": math.inf}, "infinity"),
        ({"num_clipped": 10.5}, "it holds 10.5"),
        ({"num_skipped": -1}, "it holds -1"),
        ({"steps": math.nan}, "it holds nan"),
        ({"ord": -1}, "it holds -1"),
        ({"ord": math.nan}, "it holds nan"),
        ({"ord": 10**400}, "too large"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damaged, said):
    first = AdaptiveThreshold(gradclip.SteadyRule())
    for norm in (8.0, 5.0):
        gradclip.clip_grad_norm_(np.array([norm]), first)
    before = first.state_dict()
    with pytest.raises(ValueError, match=f"the state is damaged: .*{said}.* Pass the result of its state_dict"):
        first.load_state_dict({**before, **damaged})
    assert first.state_dict() == before
