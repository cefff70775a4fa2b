"""Contenders that take turns in random order, and the medians of their times."""

import random
import statistics
import time


def medians(contenders, repeats, seconds=0.0):
    """Return the median of each contender in milliseconds, after one call that does not count.

    Each is called `repeats` times, and then as often as all of them can be within so many `seconds` from the start.
    A contender is a function, or a pair of one and of what prepares each call, which is not timed. Nor is what
    frees the result.
    """
    times = {name: [] for name in contenders}
    _take_turns(contenders)
    end = time.perf_counter() + seconds
    turns = 0
    while turns < repeats or time.perf_counter() < end:
        for name, taken in _take_turns(contenders):
            times[name].append(taken)
        turns += 1
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def _take_turns(contenders):
    return [(name, _seconds_of(contenders[name])) for name in random.sample(list(contenders), len(contenders))]


def _seconds_of(call):
    if isinstance(call, tuple):
        call, prepare = call
        prepare()
    start = time.perf_counter()
    result = call()
    elapsed = time.perf_counter() - start
    del result
    return elapsed
