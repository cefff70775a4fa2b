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


def medians_of_clocks(contenders, repeats, seconds, long, few):
    """Return the median milliseconds of each contender: by the wall, and of the processor for this process.

    Contenders named in `long` are called `few` times. Before a call of any other, an untimed one fills the caches.
    """
    times = {name: [] for name in contenders}
    end = time.perf_counter() + seconds
    turns = 0
    while turns < repeats or time.perf_counter() < end:
        for name in random.sample(list(contenders), len(contenders)):
            if name not in long:
                contenders[name]()
            if name not in long or turns < few:
                times[name].append(_seconds_by_both(contenders[name]))
        turns += 1
    clocks = {name: zip(*taken, strict=True) for name, taken in times.items()}
    return {name: [1e3 * statistics.median(taken) for taken in both] for name, both in clocks.items()}


def _seconds_by_both(call):
    wall, processor = time.perf_counter(), time.process_time()
    result = call()
    elapsed = time.perf_counter() - wall, time.process_time() - processor
    del result
    return elapsed


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
