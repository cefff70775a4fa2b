"""What is named as a process group, and is none."""

from types import SimpleNamespace

import pytest
import torch

import gradclip


def holder():
    return SimpleNamespace(grad=torch.tensor([3.0, 4.0]))


@pytest.mark.parametrize("name", ["process_group", "mesh"])
@pytest.mark.parametrize("value", ["dp", 3, object(), ["dp"]])
def test_groups_are_groups_where_there_are_no_other_processes(name, value):
    for call in (lambda **named: gradclip.clip_grad_norm_([holder()], 1.0, **named), gradclip.grad_norm):
        with pytest.raises(TypeError, match="process_group and mesh take process groups and meshes"):
            call(**({"parameters": [holder()]} if call is gradclip.grad_norm else {}), **{name: value})
