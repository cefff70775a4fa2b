"""Contenders that take turns in random order, and the medians of their times."""

import random
import statistics
import time


def medians(contenders, repeats, seconds=0.0, clock=time.perf_counter):
    """Return the median of each contender in milliseconds, after one call that does not count.

    Each is called `repeats` times, and then as often as all of them can be within so many `seconds` from the start.
    A contender is a function, or a pair of one and of what prepares each call, which is not timed. Nor is what
    frees the result. The `clock` may be that of this thread's processor time.
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
