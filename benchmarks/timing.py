"""Contenders that take turns in random order, and the medians of their times."""

import random
import statistics
import time


def medians(contenders, repeats):
    """Return the median of each contender in milliseconds, after one call that does not count.

    A contender is a function, or a pair of one and of what prepares each call, which is not timed. Nor is what frees
    the result.
    """
    times = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        for name in random.sample(list(contenders), len(contenders)):
            call = contenders[name]
            if isinstance(call, tuple):
                call, prepare = call
                prepare()
            start = time.perf_counter()
            result = call()
            elapsed = time.perf_counter() - start
            del result
            if repeat:
                times[name].append(1e3 * elapsed)
    return {name: statistics.median(values) for name, values in times.items()}
