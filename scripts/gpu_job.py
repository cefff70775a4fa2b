"""A command that runs in a process group of its own, for a limited time, with its output in a log and on the screen."""

import contextlib
import os
import signal
import subprocess
import threading
import time

GRACE = 5.0


class Log:
    """A file and the screen, which several threads write lines to."""

    def __init__(self, path):
        self.path, self.lock = path, threading.Lock()
        path.write_text("", "utf-8")

    def say(self, line):
        with self.lock, self.path.open("a", encoding="utf-8") as file:
            print(line, flush=True)
            file.write(line + "\n")


class Job:
    """A running command. `status` is its exit status, or says when it was stopped."""

    def __init__(self, name, command, environment, folder, log, *, prefix=""):
        self.name, self.log, self.prefix = name, log, prefix
        self.began, self.status = time.monotonic(), None
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            process_group=0,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        with self.process.stdout as lines:
            for line in lines:
                self.log.say(self.prefix + line.rstrip("\n"))
        self.ended = time.monotonic()

    def finish(self, seconds):
        """Wait until the command ends, these seconds at most; return how long it ran in all, and its status."""
        try:
            self.status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.stop()
            self.status = f"stopped after {time.monotonic() - self.began:.0f} s"
        except BaseException:
            self.stop()
            raise
        self.reader.join(1.0)  # a process that it left behind may hold the output open
        return getattr(self, "ended", time.monotonic()) - self.began, self.status

    def stop(self):
        """Interrupt the command, so that it can write what it has, and then kill what is left of its group."""
        if self.process.poll() is None:
            self._send(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE)
        self._send(signal.SIGKILL)
        self.process.wait()

    def _send(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
