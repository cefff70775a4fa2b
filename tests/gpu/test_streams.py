"""Work of the current stream: calls see what came before them on it, however far ahead the host is."""

import math
from fractions import Fraction

import pytest
import torch

import gradclip
from on_gpu import DEVICE, ON, drawn, grads, held, on_host
from rational import at_most, power_of_norm

pytestmark = pytest.mark.gpu
SHAPES = [(70, 40), (1001,), (), (70_000,)]
DTYPES = (torch.float32, torch.bfloat16)


def check(holders, norm, leaves, max_norm=0.5):
    results = on_host(grads(holders))
    assert float(norm) == pytest.approx(float(gradclip.global_norm([x.double() for x in leaves])), rel=1e-6)
    assert (max_norm * 0.99) ** 2 <= power_of_norm(results, 2) <= Fraction(max_norm) ** 2


def blank(leaves):
    """Return holders of zeros, which are there before any stream begins."""
    return held([torch.zeros_like(x, device=DEVICE) for x in leaves])


def fill(holders, values):
    for one, x in zip(holders, values, strict=True):
        one.grad.copy_(x)


def test_on_a_side_stream():
    """The gradients are written late on that stream. A call on another stream would find zeros."""
    leaves, there = drawn(50, DTYPES, SHAPES)
    holders, side = blank(there), ON.stream()
    ON.synchronize()
    with ON.using(side), ON.waiting_is_an_error():
        ON.delay()
        fill(holders, there)
        norm = gradclip.clip_grad_norm_(holders, 0.5)
        new, _ = gradclip.clip_by_global_norm(grads(holders), 0.25)
    ON.after(side)
    check(holders, norm, leaves)
    assert at_most(on_host(new), 2, 0.25)


def test_the_current_stream_goes_on_after_another():
    """Results that one stream makes are read on another one after the usual wait, in both directions."""
    leaves, there = drawn(51, DTYPES, SHAPES)
    holders, side = blank(there), ON.stream()
    ON.delay()
    fill(holders, there)
    ON.before(side)
    with ON.using(side):
        norm = gradclip.clip_grad_norm_(holders, 0.5)
        ON.delay()
    ON.after(side)
    after = gradclip.grad_norm(holders)
    check(holders, norm, leaves)
    assert 0.495 <= float(after) <= 0.5 * (1 + 1e-6)


def test_two_streams_in_turns():
    """Both have calls waiting at the same time: they must not share what a call keeps between its launches."""
    sets = [drawn(52 + i, DTYPES, SHAPES, scale=1 + i) for i in range(2)]
    streams = [ON.stream(), ON.stream()]
    rounds = [[blank(there) for _ in range(6)] for _, there in sets]
    norms = [[], []]
    ON.synchronize()
    for turn in range(6):
        for i, stream in enumerate(streams):
            with ON.using(stream), ON.waiting_is_an_error():
                if turn == 0:
                    ON.delay()
                fill(rounds[i][turn], sets[i][1])
                norms[i].append(gradclip.clip_grad_norm_(rounds[i][turn], 0.5 + i))
    for stream in streams:
        ON.after(stream)
    for i, (leaves, _) in enumerate(sets):
        assert len(set(map(float, norms[i]))) == 1
        for turn in (0, 5):
            check(rounds[i][turn], norms[i][turn], leaves, 0.5 + i)


@pytest.mark.parametrize("ahead", [True, False])
def test_many_calls_while_addresses_change(ahead):
    """Call i clips gradients of its own, all elements of which are i + 1, so a mix-up of addresses shows."""
    norms, kept = [], []
    sizes = [(7,), (33, 3), (1000,)]
    count = sum(math.prod(size) for size in sizes)
    with ON.waiting_is_an_error():
        if ahead:
            ON.delay()
        for i in range(150):
            holders = held([torch.full(size, i + 1.0, device=DEVICE) for size in sizes])
            norms.append(gradclip.clip_grad_norm_(holders, 1.0))
            kept.append(holders if i % 10 == 0 else None)  # memory of the others is given to later calls
    assert [float(norm) for norm in norms] == pytest.approx([(i + 1) * math.sqrt(count) for i in range(150)], rel=1e-6)
    for holders in filter(None, kept):
        results = on_host(grads(holders))
        assert at_most(results, 2, 1.0)
        assert min(x.min() for x in results) == pytest.approx(1 / math.sqrt(count), rel=1e-5)
        assert max(x.max() for x in results) == pytest.approx(1 / math.sqrt(count), rel=1e-5)


def test_two_models_in_turns():
    """Calls on gradients of other shapes, dtypes and counts come between: each keeps its own chunks."""
    one, other = drawn(55, (torch.float32,), SHAPES), drawn(56, (torch.float16, torch.float32), [(13,), (40, 40)])
    results = []
    ON.delay()
    for _ in range(10):
        for leaves, there in (one, other):
            holders = held(there)
            results.append((holders, gradclip.clip_grad_norm_(holders, 0.5), leaves))
    for result in results[:2] + results[-2:]:
        check(*result)


def test_the_same_gradients_again():
    """Clipped to 1, to 0.5, to 0.25: each call reads what the one before has written."""
    leaves, there = drawn(57, (torch.float32,), SHAPES)
    holders = held(there)
    ON.delay()
    with ON.waiting_is_an_error():
        norms = [gradclip.clip_grad_norm_(holders, max_norm) for max_norm in (1.0, 0.5, 0.25)]
    wanted = [float(gradclip.global_norm([x.double() for x in leaves])), 1.0, 0.5]
    assert [float(norm) for norm in norms] == pytest.approx(wanted, rel=2e-5)
    assert at_most(on_host(grads(holders)), 2, 0.25)


def test_gradients_that_die_right_after_the_call():
    """Their memory may be given away before the kernels have run, but only to work that comes later."""
    ON.delay()
    norms = []
    for i in range(20):
        norms.append(gradclip.clip_by_global_norm([torch.full((70_000,), i + 1.0, device=DEVICE)], 1.0)[1])
        torch.full((70_000,), math.nan, device=DEVICE)
    assert [float(norm) for norm in norms] == pytest.approx([(i + 1) * math.sqrt(70_000) for i in range(20)], rel=1e-6)
