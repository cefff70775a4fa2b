"""Time one call on a GPU: by the host, and by the device's own events. On the CPU the same code takes the wall's time.

`alone`: the queue of the device is empty. The host's time is that of the call itself, which does not wait; the events
are recorded before and after it, so they include what the device waits for the host.

`behind`: the device is first kept busy for longer than the host takes to queue the call, as in a training step, whose
backward pass is still running. So the events are the time that the call adds to the device.
"""

import random
import statistics
import time

import torch
from gpu_worker import text_of

MARGIN = 1.5
"""The device is kept busy for this many times the host's time."""
MOST_BUSY = 0.05
"""Seconds. The device is kept busy for no longer."""
COPIED = 2**30
CYCLES = 2_000_000


class Device:
    """A GPU, or for rehearsals the CPU."""

    def __init__(self, name):
        self.name = name
        self.real = name == "cuda"
        self._cycles = self._cycles_of_a_second() if self.real else 0

    def described(self):
        """Return the name of the device, the size of its cache, and the speed of a copy within it."""
        if not self.real:
            return {"device": "CPU", "cache": 0, "copy GB/s": self._speed_of_copy(COPIED // 64)}
        found = torch.cuda.get_device_properties(0)
        names = {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        return {**names, "cache": getattr(found, "L2_cache_size", 0), "copy GB/s": self._speed_of_copy(COPIED)}

    def wait(self):
        if self.real:
            torch.cuda.synchronize()

    def forget(self):
        if self.real:
            torch.cuda.empty_cache()

    def alone(self, call):
        """Return the seconds of the device and of the host, for a call whose queue is empty before."""
        self.wait()
        return self._timed(call)

    def behind(self, call, host):
        """Return the seconds that a call adds to a busy device; `host` is what the host takes."""
        self.wait()
        if self.real:
            torch.cuda._sleep(int(self._cycles * min(MARGIN * host + 1e-4, MOST_BUSY)))
        return self._timed(call)[0]

    def _timed(self, call):
        if not self.real:
            start = time.perf_counter()
            result = call()
            taken = time.perf_counter() - start
            del result
            return taken, taken
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        start = time.perf_counter()
        result = call()
        host = time.perf_counter() - start
        last.record()
        torch.cuda.synchronize()
        del result
        return first.elapsed_time(last) / 1e3, host

    def _cycles_of_a_second(self):
        taken = []
        for _ in range(3):
            torch.cuda.synchronize()
            taken.append(self._timed(lambda: torch.cuda._sleep(CYCLES))[0])
        return CYCLES / min(taken)

    def _speed_of_copy(self, size):
        """Return the bytes that a copy reads and writes, in GB a second."""
        source, target = (torch.ones(size, dtype=torch.uint8, device=self.name) for _ in range(2))
        taken = [self.alone(lambda: target.copy_(source))[0] for _ in range(8)]
        return 2 * size / 1e9 / statistics.median(taken[1:])


def medians(device, contenders, seconds, least=5, most=100):
    """Return the number of turns and, by contender, the median times or the error of the first call.

    Contenders are functions with one that prepares a call, which is not timed. They take turns in random order, at
    least `least` times and until the seconds have passed.
    """
    host, errors = _first_calls(device, contenders)
    taken = {name: [] for name in host}
    end = time.perf_counter() + seconds
    turns = 0
    while taken and turns < most and (turns < least or time.perf_counter() < end):
        for name in random.sample(list(taken), len(taken)):
            call, prepare = contenders[name]
            prepare()
            alone, host[name] = device.alone(call)
            prepare()
            taken[name].append((device.behind(call, host[name]), alone, host[name]))
        turns += 1
    return turns, {name: _summary(times) for name, times in taken.items()}, errors


def _first_calls(device, contenders):
    """Call each contender until kernels are compiled, and return the host's seconds, and the errors."""
    host, errors = {}, {}
    for name, (call, prepare) in contenders.items():
        try:
            for _ in range(3):
                prepare()
                host[name] = device.alone(call)[1]
        except Exception as error:
            host.pop(name, None)
            errors[name] = text_of(error)
            device.wait()  # raises if the device is of no more use
    return host, errors


def _summary(times):
    behind, alone, host = (statistics.median(some) for some in zip(*times, strict=True))
    return {"ms": 1e3 * behind, "alone ms": 1e3 * alone, "host us": 1e6 * host}
