"""Lines of JSON, which any tool reads."""

import json
import math

import numpy as np
import pytest

from gradclip._src.monitor.records import Layers, Step
from gradclip._src.monitor.saved import from_lines, to_line

STEPS = [
    Step(1, 5.0, 2.0, layers=Layers(("a", "b"), np.array([3.0, math.inf], np.float32))),
    Step(2, math.nan, math.inf, skipped=True),
]


def test_a_line_tells_all_of_a_step():
    assert json.loads(to_line(STEPS[0])) == {
        "step": 1,
        "norm": 5.0,
        "max_norm": 2.0,
        "coefficient": 0.4,
        "clipped": True,
        "skipped": False,
        "finite": True,
        "layers": {"a": 3.0, "b": "inf"},
    }


def test_a_line_tells_a_loss_that_was_recorded():
    assert json.loads(to_line(Step(1, 5.0, 2.0, loss=0.5)))["loss"] == 0.5
    assert json.loads(to_line(Step(1, 5.0, 2.0, loss=-math.inf)))["loss"] == "-inf"


def test_no_line_has_what_json_has_not():
    told = json.loads(to_line(STEPS[1]), parse_constant=lambda name: pytest.fail(name))
    assert (told["norm"], told["max_norm"], told["coefficient"]) == ("nan", "inf", 0.0)


def test_lines_come_back_as_they_were():
    first, second = from_lines([*map(to_line, STEPS), "\n"])
    assert first[:4] == STEPS[0][:4]
    assert (first.layers.names, first.layers.norms.tolist()) == (("a", "b"), [3.0, math.inf])
    assert math.isnan(second.norm)
    assert second[2:] == STEPS[1][2:]


def test_a_line_that_was_saved_before_is_read():
    line = (
        '{"step": 2, "norm": "nan", "max_norm": "inf", "coefficient": 0.0, "skipped": true, "layers": {"nan": "-inf"}}'
    )
    (step,) = from_lines([line])
    assert (step.step, math.isnan(step.norm), step.max_norm, step.skipped) == (2, True, math.inf, True)
    assert (step.layers.names, step.layers.norms.tolist()) == (("nan",), [-math.inf])


def test_layers_beyond_float32_come_back():
    (step,) = from_lines([to_line(Step(1, 1e200, 1.0, layers=Layers(("a",), np.array([1e200]))))])
    assert step.layers.norms.tolist() == [1e200]


LAYERS_ONLY = '{"step": 1, "norm": 1, "max_norm": 1, "skipped": false, "layers": [1]}'


STRANGE = (
    *("[" * 10**5, "9" * 5000, '{"step": true, "norm": 1, "max_norm": 1, "skipped": false}'),
    '{"step": 1e999, "norm": 1, "max_norm": 1, "skipped": false}',
    '{"step": 2.0, "norm": 1, "max_norm": 1, "skipped": false}',
    '{"step": 2, "norm": 1, "max_norm": 1, "skipped": "no"}',
    '{"step": 2, "norm": "1", "max_norm": 1, "skipped": false}',
    '{"step": 2, "norm": 1, "max_norm": ' + "9" * 400 + ', "skipped": false}',
    '{"step": 2, "norm": 1, "max_norm": 1, "skipped": false, "layers": {"a": null}}',
    '{"step": 2, "norm": 1, "max_norm": 1, "skipped": false, "layers": {"a": 1, "a": 2}}',
    '{"step": 2, "norm": NaN, "max_norm": 1, "skipped": false}',
)


@pytest.mark.parametrize("line", STRANGE)
def test_a_line_that_no_monitor_has_saved_is_named(line):
    with pytest.raises(ValueError, match="line 2 is not a step saved by a Monitor, got "):
        list(from_lines([to_line(STEPS[0]), line]))


def test_steps_are_in_their_order():
    with pytest.raises(ValueError, match="line 3 is step 1, after step 2"):
        list(from_lines([*map(to_line, STEPS), to_line(STEPS[0])]))


@pytest.mark.parametrize(
    "line", [LAYERS_ONLY, "{", "[]", '{"step": 1}', '{"step": 1, "norm": "x", "max_norm": 1, "skipped": 0}']
)
def test_a_line_that_is_none_is_named(line):
    with pytest.raises(ValueError, match="line 2 is not a step saved by a Monitor, got "):
        list(from_lines([to_line(STEPS[0]), line]))
