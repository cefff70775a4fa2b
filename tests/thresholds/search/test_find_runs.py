"""Short trainings in this process and in others, and what they report when they fail."""

import functools
import math
import os
import subprocess
import sys

import pytest

from gradclip._src.thresholds.search.find import Run, losses_of

RUNS = [Run(max_norm, None, seed) for max_norm in (0.5, 2.0) for seed in (0, 1)]


def distance(max_norm, seed, parent=None):
    return abs(max_norm - 1) + seed + 100 * (os.getpid() == parent)


def fails_above_one(max_norm, seed):
    if max_norm > 1:
        raise ValueError(f"{max_norm} is too high")
    return 0.0


def stops(max_norm, seed):
    os._exit(3)


def returns_none(max_norm, seed):
    return None


def test_losses_come_in_the_order_of_the_runs():
    assert losses_of(distance, RUNS, 1) == [0.5, 1.5, 1.0, 2.0]


def test_workers_are_other_processes():
    watched = functools.partial(distance, parent=os.getpid())
    assert losses_of(watched, RUNS, 1) == [100.5, 101.5, 101.0, 102.0]
    assert losses_of(watched, RUNS, 2) == [0.5, 1.5, 1.0, 2.0]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_names_the_arguments(workers):
    with pytest.raises(RuntimeError, match=r"train\(max_norm=2, seed=0\) raised ValueError: 2.0 is too high") as caught:
        losses_of(fails_above_one, RUNS[1:3], workers)
    trace = str(caught.value.__cause__) if workers == 1 else caught.value.__notes__[0]
    assert "2.0 is too high" in trace


def test_what_is_no_number_is_refused():
    with pytest.raises(TypeError, match=r"train\(max_norm=0.5, seed=0\) returned None. It must return the final loss"):
        losses_of(returns_none, RUNS, 1)


def test_text_is_no_number_even_if_it_reads_like_one():
    with pytest.raises(TypeError, match=r"returned '1\.5'\. It must return the final loss as one number"):
        losses_of(lambda *_: "1.5", RUNS[:1], 1)


def test_a_tensor_with_a_graph_is_a_number():
    import torch  # not where worker processes would import it too

    weight = torch.ones((), requires_grad=True)
    assert losses_of(lambda *_: 2 * weight, RUNS[:1], 1) == [2.0]


@pytest.mark.parametrize(
    ("loss", "kept"), [(math.inf, math.nan), (-math.inf, math.nan), (math.nan, math.nan), (2, 2.0)]
)
def test_what_is_not_finite_has_diverged(loss, kept):
    assert losses_of(lambda *_: loss, RUNS[:1], 1) == pytest.approx([kept], nan_ok=True)


def test_the_rate_is_passed_between_threshold_and_seed():
    assert Run(0.5, 0.01, 3).final_loss(lambda *given: given == (0.5, 0.01, 3)) == 1.0
    assert str(Run(0.5, 0.01, 3)) == "train(max_norm=0.5, learning_rate=0.01, seed=3)"


def test_functions_that_cannot_be_sent_are_refused():
    with pytest.raises(TypeError, match="Define train at the top level of a module, or pass workers=1"):
        losses_of(lambda max_norm, seed: 0.0, RUNS, 2)
    with pytest.raises(TypeError, match="Define train at the top level"):
        losses_of(functools.partial(lambda x, y, z: 0.0, 1), RUNS, 2)


def test_a_process_that_ends_is_reported():
    with pytest.raises(RuntimeError, match="a worker process ended before its training did"):
        losses_of(stops, RUNS[:1], 2)


SCRIPT = """
import gradclip
def train(max_norm, seed):
    return abs(max_norm - 1)
{guard}
    print(gradclip.find_max_norm(train, [0.5, 1.0, 2.0], seeds=1, workers=2).max_norm)
"""


def run(*arguments, text=None):
    return subprocess.run([sys.executable, *arguments], input=text, capture_output=True, text=True, timeout=120)


def test_scripts_work_below_a_guard_and_are_told_about_it(tmp_path):
    script = tmp_path / "search.py"
    script.write_text(SCRIPT.format(guard='if __name__ == "__main__":'))
    assert run(str(script)).stdout == "1.0\n"
    script.write_text(SCRIPT.format(guard="if True:"))
    assert 'below `if __name__ == "__main__":`' in run(str(script)).stderr


def test_what_is_typed_into_a_session_is_refused():
    assert "typed into a session or notebook" in run("-", text=SCRIPT.format(guard="if True:")).stderr
