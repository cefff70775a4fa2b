"""Call the kernels in new threads of processes that have next to no memory left, and print how these ended."""

import ctypes
import os
import resource
import signal
import sys
from _thread import allocate_lock, start_new_thread
from collections import Counter

import numpy as np

from gradclip._src.native import describe_buffers, kernels

ELEMENTS = 4 << 19  # enough for four threads that compute
ROOMS = [(block, number) for block in (48, 500, 5000, 40_000) for number in range(1, 9)]
SIZES = [2**k for k in range(24, 5, -1)] + [24]
RIGHT, OUT_OF_MEMORY, WRONG = 0, 3, 4
c = ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
c.free.restype, c.free.argtypes = None, [ctypes.c_void_p]


def described(x):
    return describe_buffers([x]).kernels


def calls():
    ones = described(np.ones(ELEMENTS, np.float32))
    yield lambda: ones.sum(3.0, 1.0, False, 4)[0] == ELEMENTS
    yield lambda: len(ones.exact_sum(1, 4)) == 2
    for examples, columns in ((8, ELEMENTS // 8), (ELEMENTS // 256, 256), (2, 3_000_000)):
        yield added(np.ones((examples, columns), np.float32))


def added(batch):
    """Return a call that adds examples by columns, by groups, or tile by tile."""
    examples, columns = batch.shape
    squares, totals = np.zeros(examples), np.zeros(columns)
    arguments = described(batch), examples, (1.0, 0.0, 1e30, 1.0, 1.0), described(squares), described(totals), 4

    def call():
        squares[:] = totals[:] = 0.0
        kernels.add_examples(*arguments)
        return totals[0] == totals[-1] == examples

    return call


def exhaust(block, number):
    """Take all memory but a number of blocks."""
    malloc, free = c.malloc, c.free
    reserve = [malloc(block) for _ in range(number)]
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    for wanted in SIZES:
        while malloc(wanted):
            pass
    for address in reserve:
        free(address)


def child(call, block, number):
    call()  # its threads leave their stacks to the threads of the next call, which could not have others
    begun, ready = allocate_lock(), allocate_lock()

    def work():
        begun.release()
        ready.acquire()
        try:
            code = RIGHT if call() else WRONG
        except MemoryError:
            code = OUT_OF_MEMORY
        os._exit(code)

    begun.acquire()
    ready.acquire()
    signal.alarm(5)
    start_new_thread(work, ())
    begun.acquire()
    exhaust(block, number)
    ready.release()
    begun.acquire()  # never: the thread ends the process


def main():
    ends = Counter()
    for call in calls():
        for room in ROOMS:
            pid = os.fork()
            if not pid:
                child(call, *room)
            ends[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])] += 1
    return dict(ends)


if __name__ == "__main__":
    sys.stdout.write(f"{main()}\n")
