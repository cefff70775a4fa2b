"""What `clip_at_step` says of itself. The other files of this folder test how it clips."""

import inspect
import subprocess
import sys

import pytest
import torch

import gradclip
from gradclip._src.step.fold import FusedClipping


def test_only_the_optimizer_and_the_threshold_go_without_a_name():
    kinds = {name: one.kind for name, one in inspect.signature(gradclip.clip_at_step).parameters.items()}
    named = [name for name, kind in kinds.items() if kind is not inspect.Parameter.KEYWORD_ONLY]
    assert named == ["optimizer", "max_norm"]


def test_the_name_is_there_without_pytorch():
    code = "import sys; sys.modules['torch'] = None; import gradclip; print(gradclip.clip_at_step.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "clip_at_step"


@pytest.mark.parametrize(
    ("made", "asked", "folds"),
    [(True, "auto", True), (True, True, True), (True, False, False), (False, "auto", False), (False, False, False)],
)
def test_fused_says_whether_the_step_itself_clips(made, asked, folds):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=made)
    clipping = gradclip.clip_at_step(optimizer, 1.0, fused=asked)
    assert isinstance(clipping, FusedClipping) is folds
    weight.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    assert weight.tolist() == pytest.approx([-0.6, -0.8])
