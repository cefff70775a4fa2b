"""Time contenders in turns, in random order, and return their medians."""

import random
import statistics
import time


def medians(contenders, repeats, seconds=0.0, clock=time.perf_counter):
    """Return the median time of each contender in milliseconds, after one warm-up call.

    Each contender is called at least `repeats` times. All are called until `seconds` have passed. A contender is a
    function, or a pair of a function and a function that prepares each call. Preparing a call and freeing its result
    are not timed. `clock` may be this thread's processor time.
    """
    times = {name: [] for name in contenders}
    _take_turns(contenders, clock)
    end = time.perf_counter() + seconds
    turns = 0
    while turns < repeats or time.perf_counter() < end:
        for name, taken in _take_turns(contenders, clock):
            times[name].append(taken)
        turns += 1
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def _take_turns(contenders, clock):
    return [(name, _seconds_of(contenders[name], clock)) for name in random.sample(list(contenders), len(contenders))]


def _seconds_of(call, clock):
    if isinstance(call, tuple):
        call, prepare = call
        prepare()
    start = clock()
    result = call()
    elapsed = clock() - start
    del result
    return elapsed
