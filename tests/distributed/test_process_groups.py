"""Gradients that several processes hold, beside what one process makes of the same gradients."""

import json
import signal
from types import SimpleNamespace

import pytest
import torch

import processes
from gradclip._src.backends.torch.distributed import device_for


@processes.cases(
    (2, "functions.py"),
    (2, "one_dimension.py"),
    (3, "one_dimension.py"),
    (2, "ties.py"),
    (3, "ties.py"),
    (2, "tied.py"),
    (3, "tied.py"),
    (4, "two_dimensions.py"),
    (4, "noise_of_parts.py"),
    (4, "misuse.py"),
    (2, "wrappers.py"),
    (2, "optimizers.py"),
    (2, "folded.py"),
    (2, "guarding.py"),
    (2, "at_step.py"),
    (3, "alone.py"),
    (3, "mistaken.py"),
    (2, "adaptive.py"),
    (2, "by_parts.py"),
    (3, "by_parts.py"),
    (2, "chosen.py"),
)
def test_as_on_one_process(request, world, script, case):
    processes.check(request.session.items, world, script, case)


def test_a_case_that_fails_is_seen():
    found = processes.results(2, "failing.py", timeout=180)
    assert found["good"] == {0: None, 1: None}
    assert "AssertionError" in found["not_on_the_second"][1]
    assert found["ended"][1]


def test_what_does_not_end_is_ended():
    with pytest.raises(TimeoutError, match="not done after 1 s"):
        processes.run(1, "failing.py", "sleep", timeout=1)


@pytest.mark.after_error
@pytest.mark.parametrize(("before", "waiting", "ranks"), [(1, 3, "1, 3"), (2, 0, "0, 1")])
def test_the_others_end_when_one_is_killed(before, waiting, ranks):
    """Killed before the first reduction it leaves 3, its partner in that, waiting; before the second 0."""
    ended = processes.run(4, "killed.py", str(before), timeout=180)
    assert ended[1].status == -signal.SIGKILL
    for rank in {0, 2, 3}:
        told = json.loads(ended[rank].output)
        assert told["state"] == ("as before" if told["error"] else "clipped"), told
    assert f"over the ranks {ranks}: one of them has ended" in json.loads(ended[waiting].output)["error"]


@pytest.mark.parametrize(
    ("types", "expected"), [(["cpu", "cuda"], "cpu"), (["xpu"], "xpu"), (["hpu", "xpu"], "hpu"), ([], "cpu")]
)
def test_gradients_moved_to_the_host_are_reduced_where_their_group_can(types, expected):
    """As after FSDP2's CPUOffloadPolicy: parameters in host memory, a group that may know only an accelerator."""
    group = SimpleNamespace(handle=SimpleNamespace(_device_types=[torch.device(name) for name in types]))
    assert device_for([group] if types else [], [torch.ones(2)]).type == expected


@pytest.mark.parametrize(("there", "expected"), [(False, "cpu"), (True, "cuda")])
def test_an_accelerator_that_is_not_there_reduces_nothing(monkeypatch, there, expected):
    """PyTorch for CUDA names one, and gloo knows it, on machines without a GPU, too."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: there)
    group = SimpleNamespace(handle=SimpleNamespace(_device_types=[torch.device("cpu"), torch.device("cuda")]))
    assert device_for([group], [SimpleNamespace(grad=None)]).type == expected
