import contextlib
import copy
import pickle
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier, BrokenBarrierError

import numpy as np
import pytest
import torch

import fresh_process
import gradclip
from gradclip import PoissonBatches, PrivateRun, clipped_sum_sensitivity
from gradclip._src.private.run.accounting import epsilon, multiplier_on_integers

BATCHES = PoissonBatches(1000, 0.05, steps=40, pad_to=128)
ON_GRID = clipped_sum_sensitivity(1.0, batch_size=128, grid=2**20)
FLOATS = clipped_sum_sensitivity(1.0, batch_size=128)
SUM = np.array([3 * 2**20, -(2**20), 0])


def run_with(sensitivity=ON_GRID, batches=None, **settings):
    batches = batches or replace(BATCHES)  # an object of its own: it counts what is drawn
    return PrivateRun(batches, sensitivity, **{"delta": 1e-5, "noise_multiplier": 1.0} | settings)


def planned(steps, multiplier=1.0, batches=BATCHES):
    return epsilon(batches.rate, steps, multiplier, 1e-5, overflow=batches.overflow)


def test_epsilon_is_of_what_was_released():
    run = run_with(noise_multiplier=4.0)
    assert run.epsilon() == 0.0
    noised = [run.add_noise(SUM) for _ in range(3)]
    assert run.releases == 3
    assert run.epsilon() == run.epsilon(steps=3) == pytest.approx(planned(3, 4.0), rel=1e-6)
    assert run.epsilon() < run.epsilon(40) == pytest.approx(planned(40, 4.0), rel=1e-6)
    assert all(x.dtype == np.int64 for x in noised)
    assert len({x.tobytes() for x in noised}) == 3


def test_the_noise_is_that_of_the_multiplier():
    run = run_with(noise_multiplier=2.0)
    noise = run.add_noise(np.zeros(4000, np.int64)) / 2**20
    # 4000 draws: their deviation is 2.0 within 5 * 2 / sqrt(8000).
    assert abs(noise.std() - 2.0) < 0.12


def test_a_failed_release_is_not_counted():
    run = run_with()
    with pytest.raises((TypeError, ValueError)):
        run.add_noise(np.zeros(3, complex))
    assert run.releases == 0


def test_more_releases_than_steps_overflow_more_often():
    batches = PoissonBatches(1000, 0.05, steps=40, pad_to=95)
    assert 1e-9 < batches.overflow < 1e-7
    found = run_with(batches=batches).epsilon(41)
    assert found >= epsilon(batches.rate, 41, 1.0, 1e-5, overflow=2 * batches.overflow)
    assert found > epsilon(batches.rate, 41, 1.0, 1e-5, overflow=batches.overflow)


def test_threads_count_every_release(monkeypatch):
    run, interval = run_with(FLOATS, batches=replace(BATCHES, steps=4000)), sys.getswitchinterval()
    monkeypatch.setattr("gradclip._src.private.run.run.add_noise", lambda *args, **settings: 0)
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: run.add_noise(SUM), range(4000)))
    finally:
        sys.setswitchinterval(interval)
    assert run.releases == 4000


def test_threads_release_no_more_than_the_run_has(monkeypatch):
    run = run_with(FLOATS, batches=replace(BATCHES, steps=100))
    start = Barrier(8)

    def noised(*args, **settings):
        with contextlib.suppress(BrokenBarrierError):
            start.wait(timeout=0.1)  # so that all threads are past the first look
        return 0

    def release(_):
        with contextlib.suppress(ValueError):
            return run.add_noise(SUM)

    monkeypatch.setattr("gradclip._src.private.run.run.add_noise", noised)
    with ThreadPoolExecutor(8) as pool:
        released = list(pool.map(release, range(200)))
    assert run.releases == released.count(0) == 100


def test_what_epsilon_rests_on_is_fixed():
    run = run_with()
    run.add_noise(SUM)
    for name in ("noise_multiplier", "sensitivity", "batches", "delta"):
        with pytest.raises(AttributeError, match=f"{name} of a run is fixed: .* Make another PrivateRun"):
            setattr(run, name, getattr(run, name))
    run.releases += 1
    assert run.releases == 2
    for fewer in (1, 0, -1):
        with pytest.raises(
            ValueError, match=r"2 sums are released, and what is released stays so|must be a whole number"
        ):
            run.releases = fewer
    for other in (copy.copy(run), copy.deepcopy(run), pickle.loads(pickle.dumps(run))):
        other.add_noise(SUM)
        assert (other.releases, run.releases) == (3, 2)


@pytest.mark.parametrize("seed", [None, 0, np.random.default_rng(0)], ids=["system", "int", "generator"])
def test_a_run_ends_with_its_batches(seed):
    few = PoissonBatches(1000, 0.05, steps=2, pad_to=128, seed=seed)
    run = run_with(batches=few)
    for _ in few:
        run.add_noise(SUM)
    for _ in few:  # a second pass
        with pytest.raises(
            ValueError, match=r"all 2 sums of this run are released.*PrivateRun\(\.\.\., state=run.state_dict"
        ):
            run.add_noise(SUM)
    assert run.releases == 2


def test_noise_for_an_epsilon():
    run = run_with(noise_multiplier=None, epsilon=2.0)
    assert 0.995 * 2.0 < run.epsilon(40) <= 2.0
    assert run.noise_multiplier == float(f"{run.noise_multiplier:.5g}")


def test_noise_for_an_epsilon_has_enough_steps_of_a_coarse_grid():
    coarse = clipped_sum_sensitivity(1.0, batch_size=128, grid=10)
    assert run_with(coarse, noise_multiplier=None, epsilon=0.5).noise_multiplier == 6.4  # 64 steps
    assert run_with(noise_multiplier=None, epsilon=0.5).noise_multiplier < 6.4


def test_a_coarse_grid_needs_more_noise():
    coarse = clipped_sum_sensitivity(1.0, batch_size=128, grid=80)
    exact, by_integers = run_with().epsilon(40), run_with(coarse).epsilon(40)
    assert by_integers == pytest.approx(planned(40, multiplier_on_integers(1.0, 80)), rel=1e-9)
    assert by_integers > 1.0005 * exact


def test_generators_are_counted_as_the_reals_and_not_proven():
    run = run_with(FLOATS, rng=np.random.default_rng(0))
    first, second = run.add_noise(np.zeros(3)), run.add_noise(np.zeros(3))
    assert run.epsilon() == planned(2)
    assert (first != second).all()
    assert "not proven: the noise is that of a generator" in str(run)
    noised = run_with(FLOATS, rng=torch.Generator().manual_seed(1)).add_noise(torch.zeros(3))
    assert noised.dtype == torch.float32


def test_thresholds_may_change_from_step_to_step():
    run = run_with(FLOATS)
    run.add_noise(np.zeros(2), sensitivity=clipped_sum_sensitivity(0.25, batch_size=128))
    assert run.releases == 1
    with pytest.raises(ValueError, match="fewer steps than that of the run"):
        run.add_noise(SUM[:2], sensitivity=clipped_sum_sensitivity(1.0, batch_size=128, grid=2**10))
    with pytest.raises(ValueError, match="fewer steps than that of the run"):  # floats have 2**16
        run_with(ON_GRID).add_noise(np.zeros(2), sensitivity=FLOATS)
    with pytest.raises(ValueError, match="the run protects one example, and this sum moves by one group"):
        run.add_noise(np.zeros(2), sensitivity=replace(FLOATS, unit="group"))
    assert run.releases == 1


def test_a_clipped_function_and_its_batches():
    def loss(w, x):
        return (w * x).sum()

    fun = gradclip.clipped_grad(loss, 1.0, pad_to=BATCHES.pad_to, grid=2**20)
    w, data = torch.zeros(3), torch.ones(1000, 3)
    run = run_with(fun.sensitivity())
    for indices, mask in run.batches:
        summed = fun(w, data[indices], mask=torch.as_tensor(mask))
        w = w - 0.01 * run.add_noise(summed) / 2**20
        break
    assert run.releases == 1
    assert torch.isfinite(w).all()


def test_what_is_printed_is_never_smaller():
    run = run_with(batches=PoissonBatches(1000, 0.05, steps=40, pad_to=95), noise_multiplier=4.0)
    for releases in (1, 7, 20, 40):
        run.releases = releases
        found = r"epsilon (.*) at delta (.*), add[\s\S]*probability of at most (.*)\)"
        shown = re.search(found, str(run))
        assert run.epsilon() <= float(shown[1]) <= run.epsilon() * 1.001
        assert run.batches.overflow <= float(shown[3]) <= run.batches.overflow * 1.1
    assert "at delta 1.2345678e-05," in str(run_with(delta=1.2345678e-5))


def test_its_repr_says_where_it_stands_and_holds_no_secret():
    secret = {"batches": replace(BATCHES, seed=314159), "rng": np.random.default_rng(271828)}
    run = run_with(FLOATS, noise_multiplier=2.0, **secret)
    run.releases = 3
    assert repr(run) == "PrivateRun(noise_multiplier=2, delta=1e-05, 3 of 40 sums released)"


def test_in_words():
    run = run_with(replace(ON_GRID, unit="group"))
    run.add_noise(SUM)
    text = str(run)
    first = re.fullmatch(
        "epsilon (.*) at delta 1e-05, add or remove one group: 1 of 40 sums released", text.splitlines()[0]
    )
    assert run.epsilon() <= float(first[1]) < run.epsilon() * 1.001
    assert "1000 groups, rate 0.05, at most 128 in a batch (more would be drawn with a probability of at most" in text
    assert "noise multiplier 1, sensitivity 1\n" in text
    assert "not proven: a gradient depends on its own group only" in text
    assert text.count("not proven") == 1
    seeded = str(run_with(batches=PoissonBatches(1000, 0.05, steps=40, pad_to=128, seed=0), delta=1e-2))
    assert "not proven: the batches follow from a seed" in seeded
    assert "not proven: that no example is revealed whole: delta is not below 1 / n" in seeded


def test_a_second_sum_of_a_batch_is_refused():
    run = run_with()
    for number, _ in enumerate(run.batches, 1):
        run.add_noise(SUM)
        with pytest.raises(ValueError, match=rf"{number} sums were .* drawn, and {number} were: .* a second sum"):
            run.add_noise(SUM)
        assert run.releases == number
        if number == 3:
            break
    next(iter(run.batches))
    run.add_noise(SUM)
    whole = run_with(batches=PoissonBatches(100, 1.0, steps=4))
    next(iter(whole.batches))
    for _ in range(2):  # without sampling, two sums of a batch are two steps
        whole.add_noise(SUM)
    assert whole.releases == 2


def test_batches_drawn_ahead_or_elsewhere_are_no_second_sums():
    run = run_with()
    ahead = list(run.batches)
    for _ in ahead[:9]:
        run.add_noise(SUM)
    assert run.releases == 9
    continued = pickle.loads(pickle.dumps(run))  # whose batches are drawn by another object
    continued.add_noise(SUM)
    next(iter(continued.batches))
    continued.add_noise(SUM)
    with pytest.raises(ValueError, match="second sum of one batch"):
        continued.add_noise(SUM)
    assert continued.releases == 11


FORK = """
import os, pickle
import numpy as np
from gradclip import PoissonBatches, PrivateRun, clipped_sum_sensitivity

sensitivity = clipped_sum_sensitivity(1.0, batch_size=128)
for rng in ("system", np.random.default_rng(0)):
    batches = PoissonBatches(1000, 0.05, steps=40, pad_to=128)
    run = PrivateRun(batches, sensitivity, delta=1e-5, noise_multiplier=1.0, rng=rng)
    run.add_noise(np.zeros(3))
    child = os.fork()
    if not child:
        try:
            run.add_noise(np.zeros(3))
        except ValueError as error:
            print(error)
        own = pickle.loads(pickle.dumps(run))
        own.add_noise(np.zeros(3))
        print(own.releases, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    run.add_noise(np.zeros(3))
    print(run.releases, flush=True)
"""


def test_a_forked_process_does_not_release():
    found = fresh_process.run(FORK, ".").splitlines()
    assert len(found) == 6
    for error, own, parents in (found[:3], found[3:]):
        assert error.startswith("this run was made in another process, which does not count what is released here.")
        assert (own, parents) == ("2", "2")


def test_zeros_in_the_place_of_an_example():
    run = run_with(clipped_sum_sensitivity(1.0, "zero_out", batch_size=128))
    run.add_noise(np.zeros(3))
    assert run.epsilon() == run_with(FLOATS).epsilon(1)
    assert "at delta 1e-05, zero out one example: 1 of 40 sums released" in str(run)
    with pytest.raises(ValueError, match=r"is for 'add_or_remove_one', and that of the run for 'zero_out'\."):
        run.add_noise(np.zeros(3), sensitivity=FLOATS)
    assert run.releases == 1
    assert run_with(FLOATS, rng="opendp").exact
