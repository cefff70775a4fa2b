import math

import pytest

from gradclip._src.logs.picture import write
from gradclip._src.logs.replay import ThresholdRule, replay
from gradclip._src.monitor.records import Columns, Step


@pytest.mark.parametrize("norms", [[1.0], [math.nan, math.inf], [0.0], [1.0, 2.0, 1e300] * 1000])
def test_a_picture_is_drawn(tmp_path, norms):
    columns = Columns.of(Step(place, norm, math.inf) for place, norm in enumerate(norms, 1))
    path = write(
        columns,
        replay(columns, [ThresholdRule.parse(one) for one in ("1", "inf", "0", "adaptive")]),
        tmp_path / "a.png",
    )
    assert path.read_bytes().startswith(b"\x89PNG")
