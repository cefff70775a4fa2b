"""How the steps of an optimizer clip is chosen by what was asked for, and by what the optimizer can do."""

import pytest
import torch

from gradclip import clip_at_step
from gradclip._src.step.at_step import ClippingBeforeStep
from gradclip._src.step.fold import FusedClipping
from gradclip._src.step.scoped import ScopedClipping


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, FusedClipping),
        ({"fused": False}, ClippingBeforeStep),
        ({"nonfinite": "zero"}, ClippingBeforeStep),
        ({"max_norm": 2.0**101}, ClippingBeforeStep),
        ({"max_norm": {"*": 1.0}}, ClippingBeforeStep),
        ({"where": "*"}, ClippingBeforeStep),
        ({"integers": "raise"}, ClippingBeforeStep),
        ({"scope": "layer"}, ScopedClipping),
    ],
    ids=str,
)
def test_a_fused_step_clips_where_it_can(settings, kind):
    optimizer = torch.optim.SGD([("w", torch.nn.Parameter(torch.zeros(2)))], lr=1.0, fused=True)
    assert type(clip_at_step(optimizer, **{"max_norm": 1.0, **settings})) is kind
