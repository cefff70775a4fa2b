"""Calls drawn at random in which one process errs: all raise, nothing changes, and the next call succeeds."""

import math
import os
import random
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import gradclip
from gradients import local, numbers, parameter
from worker import run_all

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
DRAWS = int(os.environ.get("DRAWS", "40"))
FIRST_DRAW = int(os.environ.get("FIRST_DRAW", "0"))
HEARD = ("failed on another process", "passed different arguments")
MISTAKES = {
    "max_norm": [-1.0, math.nan, "1", torch.ones(2), object(), 10**400, "other order", "other skip_above"],
    "ord": [0, 0.5, "two", 9, []],
    "nonfinite": ["no", [], None],
    "monitor": ["monitor", gradclip.Monitor, 3],
    "parameters": ["no parameter", "key", "engine", "integers", "broken"],
    "process_group": ["dp", 3],
}


def held(rng, kind):
    """Return the parameters of this process, and the options of a call with them."""
    seed = rng.randrange(1000)
    if kind == "shards":
        row, placement = init_device_mesh("cpu", (WORLD,)), rng.choice([Shard(0), Partial()])
        replicated = [parameter(numbers(5, seed=seed), row, [Replicate()])] * rng.randrange(2)
        return [*replicated, parameter(numbers(8, seed=seed + 1), row, [placement], like=[Shard(0)])], {}
    count = rng.randint(1, 3)
    stage = [parameter(numbers(3, seed=seed + 100 * dist.get_rank() + i)) for i in range(count)]
    return stage, {"process_group": dist.group.WORLD} if kind == "named" else {}


def passed(params, kind, **more):
    """Return parameters as they are passed: their parameter group may name the processes that hold the rest."""
    if kind == "beside":
        more["process_group"] = dist.group.WORLD
    return [{"params": params, **more}] if more else params


def mistaken(what, wrong, params, kind, given):
    """Return parameters and arguments of the process that makes the mistake."""
    if wrong == "other order":
        wrong = gradclip.AdaptiveThreshold()
        before = [SimpleNamespace(grad=torch.ones(2))]
        gradclip.clip_grad_norm_(before, wrong, 1 if given["ord"] != 1 else 2, process_group=[])
    elif wrong == "other skip_above":
        wrong = gradclip.AdaptiveThreshold(skip_above=7.0)
    if what != "parameters":
        return passed(params, kind), {**given, what: wrong}
    if wrong == "key":
        return passed(params, kind, clip_norm=1.0), given
    if wrong == "broken":
        return broken(passed(params, kind)), given
    return passed([*params, odd(wrong)], kind), given


def odd(wrong):
    """Return what is no parameter, or one whose gradient cannot be clipped."""
    if wrong == "no parameter":
        return object()
    found = torch.nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    found.grad = torch.ones_like(found)
    if wrong == "engine":
        found = torch.nn.Parameter(torch.ones(2))
        found.ds_id = 7
    return found


def broken(parameters):
    yield from parameters
    raise KeyError("broken")


def possible(what, wrong, kind, given):
    """Say whether the call has the argument, and something else tells which processes must hear of the mistake."""
    if what == "process_group":
        return kind == "shards"
    return what in given or (what == "parameters" and (wrong != "broken" or kind == "named"))


def drawn(rng):
    """Return a call, its right arguments, and the mistake."""
    kind, call = rng.choice(["shards", "named", "beside"]), gradclip.grad_norm
    given = {"ord": rng.choice([1, 2, 2, 3, math.inf])}
    if rng.random() < 0.8:
        call, adaptive = gradclip.clip_grad_norm_, gradclip.AdaptiveThreshold(skip_above=rng.choice([2.0, math.inf]))
        given["max_norm"] = rng.choice([0.0, 0.5, math.inf, adaptive])
        given["nonfinite"] = rng.choice(["propagate", "raise", "zero", "drop"])
        given["monitor"] = rng.choice([None, gradclip.Monitor(), gradclip.Monitor(layers_every=1)])
    every = [(what, wrong) for what, wrongs in MISTAKES.items() for wrong in wrongs]
    return kind, call, given, *rng.choice([pair for pair in every if possible(*pair, kind, given)])


def refused(call):
    """Say whether a call ends with an error of this process's own, or with one that tells of another's."""
    try:
        call()
    except RuntimeError as error:
        return any(words in str(error) for words in HEARD)
    except (TypeError, ValueError, KeyError, OverflowError):
        return True
    return False


def a_mistake_of_one_process_ends_the_call_on_all():
    for seed in range(FIRST_DRAW, FIRST_DRAW + DRAWS):
        rng = random.Random(seed)
        kind, call, given, what, wrong = drawn(rng)
        params, options = held(rng, kind)
        told = f"seed {seed}: {call.__name__} of {kind}, {given}, and on one process {what}={wrong!r}"
        before = [local(p).clone() for p in params]
        listed, arguments = passed(params, kind), given
        if dist.get_rank() == rng.randrange(WORLD):
            listed, arguments = mistaken(what, wrong, params, kind, given)
        assert refused(lambda: call(listed, **{**options, **arguments})), told  # noqa: B023
        assert all(torch.equal(local(p), x) for p, x in zip(params, before, strict=True)), told
        assert math.isfinite(gradclip.grad_norm(passed(params, kind), **options)), told


if __name__ == "__main__":
    run_all(globals())
