"""Threads of the kernels that fail: an exception, or fewer threads, never the end of the process."""

import os
import subprocess
import sys
from ast import literal_eval

import numpy as np
import pytest

import scarce_memory
from fresh_process import run
from gradclip._src.native import describe_buffers

WORTH_FOUR_THREADS = 4 << 21  # elements that are read


def described(*arrays):
    return describe_buffers(arrays).kernels


@pytest.mark.parametrize("group_of", [[0, 0, 2], [0, 1], [0, 1, 1, 0], [2**40, 0, 0]])
def test_a_group_that_does_not_exist_is_an_error_in_any_thread(group_of):
    x = [np.ones(WORTH_FOUR_THREADS, np.float32) for _ in range(3)]
    table = np.array([[0.0, 0.0], [0.5, 0.5], [1.0, 1.0], [0.5, 0.5], [1.0, 1.0]])
    with pytest.raises(ValueError, match="each array must have a group below 2"):
        described(*x).group_sums(group_of, 2, 2.0, False, 4)
    with pytest.raises(ValueError, match="each array must have a group below 2"):
        described(*x).scale_groups(described(*x), group_of, described(table), 2, 4)
    assert all((leaf == 1.0).all() for leaf in x)


def test_a_lack_of_memory_is_an_exception_or_fewer_threads():
    settings = {"MALLOC_ARENA_MAX": "1", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, scarce_memory.__file__]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=True)
    ends = literal_eval(done.stdout)
    assert set(ends) == {scarce_memory.RIGHT, scarce_memory.OUT_OF_MEMORY}, (ends, done.stderr)


@pytest.mark.parametrize("call", ["sum(2.0, 1.0, False, 1)", "exact_sum(2, 1)", "fill_zero(1)"])
def test_a_process_ends_while_a_daemon_thread_is_in_the_kernels(tmp_path, call):
    code = f"""
        import threading
        import numpy as np
        from gradclip._src.native import describe_buffers

        arrays = describe_buffers([np.ones(100_000)]).kernels
        in_a_loop = threading.Event()

        def work():
            while True:
                arrays.{call}
                in_a_loop.set()

        threading.Thread(target=work, daemon=True).start()
        in_a_loop.wait()
        """
    assert run(code, tmp_path) == ""
