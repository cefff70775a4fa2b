"""Norms at their thresholds, which all processes must decide alike, or leave undecided."""

import math
import os
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import gradclip
from gradclip._src.backends.host import exact
from gradients import local, parameter
from worker import run_all

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def mesh():
    return init_device_mesh("cpu", (WORLD,))


def exactly_at_the_threshold():
    """3, 4 and 12 have the norm 13, which no computed error leaves in doubt, whoever holds them."""
    sides = [torch.tensor([3.0, 12.0]), torch.tensor([4.0]), torch.zeros(0)]
    for ord, length in ((2, 13.0), (1, 19.0)):
        p = parameter(sides[min(dist.get_rank(), 2)])
        for max_norm, kept in ((length, True), (math.nextafter(length, 0), False)):
            before = p.grad.clone()
            assert gradclip.clip_grad_norm_([p], max_norm, ord, process_group=dist.group.WORLD).item() == length
            assert torch.equal(p.grad, before) == (kept or not p.grad.numel())


def at_the_threshold_beside_plain_ones():
    """Whether all see the same norm is not known then; so all are clipped, by less than a step of float32."""
    values = torch.tensor([3.0] + [0.0] * (WORLD - 2) + [4.0])
    p, plain = parameter(values, mesh(), [Shard(0)]), parameter(torch.tensor([12.0]))
    assert gradclip.clip_grad_norm_([p, plain], 13.0).item() == 13.0
    for found, whole in ((p.grad.full_tensor(), values), (plain.grad, torch.tensor([12.0]))):
        torch.testing.assert_close(found, whole, rtol=2.0**-22, atol=0)
        assert (found <= whole).all()


def a_tie_that_only_some_see():
    """A plain gradient lacks on the last process, which alone finds the norm at the threshold: it waits for nobody."""
    p, plain = (
        parameter(torch.tensor([3.0] + [0.0] * (WORLD - 2) + [4.0]), mesh(), [Shard(0)]),
        parameter(torch.tensor([12.0])),
    )
    last = dist.get_rank() == WORLD - 1
    if last:
        plain.grad = None
    assert gradclip.clip_grad_norm_([p, plain], 5.0).item() == (5.0 if last else 13.0)


def many_elements_at_the_threshold():
    """The root of so many ones is no float64, and the nearest lies above it or below."""
    count = 120_000 * WORLD
    length = math.sqrt(count)
    for max_norm in (math.nextafter(length, 0), length, math.nextafter(length, math.inf)):
        p = parameter(torch.ones(120_000))
        assert gradclip.clip_grad_norm_([p], max_norm, process_group=dist.group.WORLD).item() == pytest.approx(length)
        assert (p.grad == 1.0).all() == (Fraction(max_norm) ** 2 >= count)


def what_cannot_be_told_clips():
    """Orders that are no integers, and magnitudes of complex numbers."""
    q = parameter(torch.ones(1))
    assert gradclip.clip_grad_norm_([q], WORLD ** (1 / 1.5), 1.5, process_group=dist.group.WORLD).item() > 1.0
    assert q.grad.item() < 1.0
    r = parameter(torch.tensor([3 + 4j]))
    assert gradclip.clip_grad_norm_([r], 5.0, math.inf, process_group=dist.group.WORLD).item() == 5.0
    assert r.grad.abs().item() < 5.0


@contextmanager
def written_meanwhile(p):
    """On the last process, a thread writes NaN to a gradient after the first look at it."""

    def late(*arguments, **options):
        local(p)[-1:] = math.nan
        return found(*arguments, **options)

    found = exact.power_sum
    with mock.patch.object(exact, "power_sum", late) if dist.get_rank() == WORLD - 1 else nullcontext():
        yield


def an_error_of_the_exact_sum_reaches_all():
    """The sums of the others wait for that of the process that fails, whatever kind of call it is."""
    values = torch.tensor([3.0] + [0.0] * (WORLD - 2) + [4.0])
    last, named = dist.get_rank() == WORLD - 1, {"process_group": dist.group.WORLD}
    for call in (
        lambda p: gradclip.clip_grad_norm_([p], 5.0),
        lambda p: gradclip.clip_grad_norm_([{"params": [p], "max_norm": 5.0}], 1.0, **named),
        lambda p: gradclip.clip_grad_layer_norm_([p], 5.0),
    ):
        p = parameter(values, mesh(), [Shard(0)])
        before = local(p).tolist()
        words = "An array holds NaN or an infinity that was not there a moment ago"
        with (
            written_meanwhile(p),
            pytest.raises(RuntimeError, match=f"^{words}" if last else f"rank {WORLD - 1}: RuntimeError: {words}"),
        ):
            call(p)
        assert last or local(p).tolist() == before


if __name__ == "__main__":
    run_all(globals())
