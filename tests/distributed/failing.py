"""Cases of which one fails; with an argument, a process that does not end."""

import sys
import time

import torch.distributed as dist

from worker import run_all


def good():
    dist.barrier()


def not_on_the_second():
    assert dist.get_rank() != 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        time.sleep(60)
    run_all(globals())
