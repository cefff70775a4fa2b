"""Import once what the scripts need, then run each script that is asked for in forks of this process.

Each line of the input asks for one run; a line of the output tells the exit status of each of its processes.
"""

import gc
import json
import os
import runpy
import sys
import traceback

import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401

import gradclip.integrations.torch  # noqa: F401


def forked(folder, environment, command):
    """Return the process id of a fork that runs a script as if it had been started on its own."""
    process = os.fork()
    if process:
        return process
    os.environ.clear()
    os.environ.update(environment)
    for name, descriptor in (("out", 1), ("err", 2)):
        file = os.open(f"{folder}/{name}{environment['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
    sys.stdin.close()
    sys.argv = command
    status = 0
    try:
        runpy.run_path(command[0], run_name="__main__")
    except BaseException:
        traceback.print_exc()
        status = 1
    leave(status)


def leave(status=0):
    """End at once: to take down what was imported takes seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main():
    """Answer the input until it ends."""
    gc.freeze()  # what is imported stays, and no fork has to go through it
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        started = [forked(asked["folder"], one, asked["command"]) for one in asked["environments"]]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in started]
        print(json.dumps(statuses), flush=True)
    leave()


if __name__ == "__main__":
    main()
