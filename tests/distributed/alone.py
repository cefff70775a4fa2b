"""Errors of one process alone, of every kind of call that several make together: all raise, and nothing changes."""

import math
import os
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import gradclip
from gradclip.integrations.torch import clip_grad_norm_, get_total_norm
from gradients import local, numbers, parameter
from worker import run_all

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
WRONG = WORLD - 2
"""The process that makes the wrong call."""


def stage(*, mesh):
    """Return the parameters of a stage, or shards along a mesh."""
    if mesh:
        return parameter(numbers(8, seed=1), init_device_mesh("cpu", (WORLD,)), [Shard(0)])
    return parameter(numbers(3, seed=dist.get_rank()))


def refused_by_all(kind, words, wrong, right, parameters):
    """Check that the last process but one raises this error, the others hear of it, and no gradient changes."""
    before = [local(p).clone() for p in parameters]
    if dist.get_rank() == WRONG:
        with pytest.raises(kind, match=words):
            wrong()
    else:
        with pytest.raises(RuntimeError, match=f"rank {WRONG}: {kind.__name__}: .*{words}"):
            right()
    assert all(torch.equal(local(p), x) for p, x in zip(parameters, before, strict=True))


def a_monitor_that_is_none():
    for mesh in (False, True):
        p = stage(mesh=mesh)
        options = {} if mesh else {"process_group": dist.group.WORLD}
        for wrong in ("monitor", gradclip.Monitor, 3):
            for monitor in (None, gradclip.Monitor()):
                refused_by_all(
                    TypeError,
                    "monitor must be a gradclip.Monitor",
                    lambda: gradclip.clip_grad_norm_([p], 1.0, monitor=wrong, **options),  # noqa: B023
                    lambda: gradclip.clip_grad_norm_([p], 1.0, monitor=monitor, **options),  # noqa: B023
                    [p],
                )
                assert monitor is None or monitor.steps == 0


def parameter_groups_that_cannot_be_listed():
    """The group of processes stands in the parameter groups, or follows from the tensors in them."""
    for mesh in (False, True):
        p = stage(mesh=mesh)
        group = {"params": [p]} if mesh else {"params": [p], "process_group": dist.group.WORLD}
        for wrong, kind, words in (
            ([group, {"params": 3}], TypeError, "parameters must be an iterable"),
            ([group, {"params": iter(())}], ValueError, "yields nothing"),
            ([{**group, "norm_type": 1.0}], ValueError, "the keys 'norm_type'"),
            ([group, {"params": [], "clip_grad": True}], ValueError, "the keys 'clip_grad'"),
            ([group, {"params": [object()]}], TypeError, "has no .grad"),
        ):
            for call in (
                gradclip.grad_norm,
                lambda listed: gradclip.clip_grad_norm_(listed, 1.0),
                lambda listed: gradclip.clip_grad_norm_(listed, gradclip.AdaptiveThreshold()),
                lambda listed: gradclip.clip_grad_norm_(listed, 1.0, monitor=gradclip.Monitor()),
                lambda listed: gradclip.clip_grad_norm_(listed, 1.0, monitor=gradclip.Monitor(layers_every=1)),
            ):
                refused_by_all(kind, words, lambda: call(wrong), lambda: call([group]), [p])  # noqa: B023


def generators_that_fail():
    def broken():
        yield stage(mesh=False)
        raise KeyError("broken")

    options = {"process_group": dist.group.WORLD}
    for max_norm in (1.0, gradclip.AdaptiveThreshold(skip_above=2.0)):
        for monitor in (None, gradclip.Monitor(layers_every=1)):
            p = stage(mesh=False)
            refused_by_all(
                KeyError,
                "broken",
                lambda: gradclip.clip_grad_norm_(broken(), max_norm, monitor=monitor, **options),  # noqa: B023
                lambda: gradclip.clip_grad_norm_([p], max_norm, monitor=monitor, **options),  # noqa: B023
                [p],
            )


def arguments_of_the_names_of_pytorch():
    p = stage(mesh=True)
    for call in (
        lambda *given, **flags: clip_grad_norm_([p], 1.0, *given, **flags),
        lambda *given, **flags: get_total_norm([p.grad], *given, **flags),
    ):
        for wrong in (0, "two", None):
            refused_by_all(ValueError, "norm_type must be", lambda: call(wrong), call, [p])  # noqa: B023
        words = "error_if_nonfinite must be"
        refused_by_all(TypeError, words, lambda: call(error_if_nonfinite="no"), call, [p])  # noqa: B023


def two_process_groups_in_both_orders():
    """That process cannot know which order the others have, and takes part in the one that it names first."""
    everyone, pair = dist.group.WORLD, dist.new_group(sorted({0, WRONG}))
    named = [everyone, pair] if dist.get_rank() in (0, WRONG) else [everyone]

    def groups(*orders):
        return [{"params": [p], "process_group": order} for p, order in zip(members, orders, strict=True)]

    for first in (named, named[::-1]):
        members = [parameter(numbers(3, seed=10 * one + dist.get_rank())) for one in range(3)]
        refused_by_all(
            ValueError,
            "in one order for some parameters and in the opposite order for others",
            lambda: gradclip.clip_grad_norm_(groups(first, first[::-1], first), 1.0),  # noqa: B023
            lambda: gradclip.clip_grad_norm_(groups(first, first, first), 1.0),  # noqa: B023
            members,
        )


def gradients_that_an_engine_holds():
    p, q = stage(mesh=False), torch.nn.Parameter(torch.ones(2))
    q.main_grad = torch.ones(2)
    options = {"process_group": dist.group.WORLD}
    for call in (gradclip.grad_norm, lambda listed, **o: gradclip.clip_grad_norm_(listed, 1.0, **o)):
        refused_by_all(
            ValueError,
            "lies in .main_grad",
            lambda: call([p, q], **options),  # noqa: B023
            lambda: call([p], **options),  # noqa: B023
            [p],
        )


def orders_that_an_adaptive_threshold_has_not_seen():
    for mesh in (False, True):
        options = {} if mesh else {"process_group": dist.group.WORLD}
        max_norm, p = gradclip.AdaptiveThreshold(), stage(mesh=mesh)
        gradclip.clip_grad_norm_([p], max_norm, **options)
        for ord, kind, words in ((1, ValueError, "observed norms of ord=2"), ("2", ValueError, "ord must be")):
            for monitor in (None, gradclip.Monitor()):
                refused_by_all(
                    kind,
                    words,
                    lambda: gradclip.clip_grad_norm_([p], max_norm, ord, monitor=monitor, **options),  # noqa: B023
                    lambda: gradclip.clip_grad_norm_([p], max_norm, monitor=monitor, **options),  # noqa: B023
                    [p],
                )
        assert max_norm.steps == 1


def what_is_wrong_beside_partial_sums():
    """The others add the terms of a sum before they hear of an error."""
    row = init_device_mesh("cpu", (WORLD,))
    p, q = (parameter(numbers(8, seed=seed), row, [Partial()], like=[Shard(0)]) for seed in (1, 2))
    for kind, words, parameters, arguments in (
        (ValueError, "ord must be", [p, q], (1.0, 0.5)),
        (ValueError, "must not be negative", [p, q], (-1.0,)),
        (TypeError, "has no .grad", [p, q, 3], (1.0,)),
        (ValueError, "the keys 'norm_type'", [{"params": [p, q], "norm_type": 1.0}], (1.0,)),
    ):
        refused_by_all(
            kind,
            words,
            lambda: gradclip.clip_grad_norm_(parameters, *arguments),  # noqa: B023
            lambda: gradclip.clip_grad_norm_([p, q], 1.0),
            [p, q],
        )
    norm = torch.linalg.vector_norm(torch.cat([numbers(8, seed=1), numbers(8, seed=2)]))
    torch.testing.assert_close(gradclip.clip_grad_norm_([p, q], 1.0), norm)


def what_is_wrong_beside_sums_that_all_hold():
    """After the sum there is nothing to exchange, so that the others do not hear of it, nor wait."""
    p = parameter(numbers(8, seed=1), init_device_mesh("cpu", (WORLD,)), [Partial()], like=[Replicate()])
    if dist.get_rank() == WRONG:
        with pytest.raises(ValueError, match="ord must be"):
            gradclip.clip_grad_norm_([p], 1.0, 0.5)
    else:
        torch.testing.assert_close(gradclip.clip_grad_norm_([p], 1.0), torch.linalg.vector_norm(numbers(8, seed=1)))


def spikes_that_only_some_would_skip():
    """Before the first call clips, since the second, which makes zeros, would be made by some alone."""
    for mesh in (False, True):
        options = {} if mesh else {"process_group": dist.group.WORLD}
        rule = gradclip.QuantileRule(initial=0.1)
        max_norm = gradclip.AdaptiveThreshold(rule, skip_above=1e9 if dist.get_rank() == WRONG else 2.0)
        p = stage(mesh=mesh)
        before = local(p).clone()
        with pytest.raises(ValueError, match=rf"skip_above is .*1000000000.0 on rank {WRONG}"):
            gradclip.clip_grad_norm_([p], max_norm, **options)
        assert torch.equal(local(p), before)
        assert max_norm.steps == 0


def a_process_without_gradients_does_not_warn():
    """The worker makes errors of warnings. Without the others, the process does warn."""
    p = stage(mesh=False)
    if dist.get_rank() == WRONG:
        p.grad = None
    gradclip.clip_grad_norm_([p], 1.0, process_group=dist.group.WORLD)
    lacking = dist.get_rank() == WRONG
    for call, options in ((gradclip.clip_grad_norm_, {"process_group": []}), (gradclip.clip_grad_value_, {})):
        with pytest.warns(UserWarning, match="no parameter has a gradient") if lacking else nullcontext():
            call([p], 1.0, **options)


def calls_that_measure(p):
    """Yield each kind of call of one parameter, alone or in groups with thresholds of their own."""
    options = {"process_group": dist.group.WORLD}
    own = [{"params": [p], "max_norm": 1.0}]
    for ord in (2, 1, math.inf, -math.inf):
        yield lambda ord=ord: gradclip.grad_norm([p], ord, **options)
        yield lambda ord=ord: gradclip.clip_grad_norm_([p], 1.0, ord, **options)
        yield lambda ord=ord: gradclip.clip_grad_norm_(own, 1.0, ord, **options)
        yield lambda ord=ord: gradclip.clip_grad_layer_norm_([p], 1.0, ord=ord, **options)


def gradients_that_are_zero_are_gradients():
    """Of one process; the others have none. Without it, all warn, whatever the order."""
    p = parameter(torch.zeros(2, dtype=torch.float64 if dist.get_rank() else torch.float32))
    if dist.get_rank() != WRONG:
        p.grad = None
    for call in calls_that_measure(p):
        call()
    p.grad = None
    for call in calls_that_measure(p):
        with pytest.warns(UserWarning, match="no parameter has a gradient"):
            call()


def gradients_without_elements_are_gradients():
    p = parameter(torch.zeros(0))
    if dist.get_rank() != WRONG:
        p.grad = None
    for call in calls_that_measure(p):
        call()


if __name__ == "__main__":
    run_all(globals())
